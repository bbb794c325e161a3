"""Every key a registry file may have, with its default and meaning, from the types that validate it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftworks.specs import DatasetSpec, DeploymentSpec, Spec, StrategyEntry, TargetSpec
from draftworks.strategies import available_strategies, resolve_strategy

FILES: dict[str, type[Spec]] = {"target": TargetSpec, "dataset": DatasetSpec, "deployment": DeploymentSpec}


class Key(NamedTuple):
    """One line of the reference; `default` is "required" where there is none."""

    name: str
    type: str
    default: str
    meaning: str


def keys_of(file: str) -> Iterator[Key]:
    """All keys of a kind of registry file, nested ones with dots; of a target also its strategies' options."""
    yield from _keys(FILES[file])
    if file == "target":
        for strategy in available_strategies():
            yield from _keys(StrategyEntry, f"strategies.{strategy}.", skip="options")
            yield from _keys(resolve_strategy(strategy).options, f"strategies.{strategy}.options.")


def _keys(model: type[BaseModel], prefix: str = "", skip: str = "strategies") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        nested = field.annotation if isinstance(field.annotation, type) else None
        if name in (skip, "name"):
            continue
        if nested is not None and issubclass(nested, BaseModel):
            yield from _keys(nested, f"{prefix}{name}.")
        else:
            yield Key(f"{prefix}{name}", _type(field.annotation), _default(field), field.description or "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else str(value)


def _type(annotation: Any) -> str:
    """`int | None`, `one of a, b`."""
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(map(_type, typing.get_args(annotation)))
    if annotation is type(None):
        return "null"
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
