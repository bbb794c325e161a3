"""Every key a registry file may have, with its default and meaning, from the types that validate it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftworks.config.registry_files import DatasetSpec, DeploymentSpec, EvalSpec, Spec, StrategyEntry, TargetSpec
from draftworks.config.strategies import available_strategies, resolve_strategy

FILES: dict[str, type[Spec]] = {
    "target": TargetSpec,
    "dataset": DatasetSpec,
    "eval": EvalSpec,
    "deployment": DeploymentSpec,
}


class Key(NamedTuple):
    """One line of the reference; `default` is "required" where there is none."""

    name: str
    type: str
    default: str
    meaning: str


def list_keys(file: str) -> Iterator[Key]:
    """All keys of a kind of registry file, nested ones with dots; of a target also its strategies' options."""
    yield from _keys(FILES[file])
    if file == "target":
        for strategy in available_strategies():
            yield from _keys(StrategyEntry, f"strategies.{strategy}.", skip="options")
            yield from _keys(resolve_strategy(strategy).options, f"strategies.{strategy}.options.")


def _keys(model: type[BaseModel], prefix: str = "", skip: str = "strategies") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        if name in (skip, "name"):
            continue
        if not _is_model(field.annotation):
            yield Key(f"{prefix}{name}", _type(field.annotation), _default(field), field.description or "")
        for nested in _alternatives(field.annotation):
            if _is_model(nested):
                yield from _keys(nested, f"{prefix}{name}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Of `X | None`, which may be left out, `X` and `None`."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else str(value)


def _type(annotation: Any) -> str:
    """`int | None`, `one of a, b`."""
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if len(alternatives := _alternatives(annotation)) > 1:
        return " | ".join(map(_type, alternatives))
    if _is_model(annotation):
        return "mapping"
    if annotation is type(None):
        return "null"
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
