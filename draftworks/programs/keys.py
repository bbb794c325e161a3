"""The command `draftworks keys`: type, default and meaning of registry keys, from the types that validate them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import DatasetSpec, EvalSpec, Spec, StrategyEntry, TargetSpec
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.evaluation.report.text_tables import TextTable, print_table
from draftworks.programs.start import report_error
from draftworks.storage.words import suggest_or_list

FILES: dict[str, type[Spec]] = {
    "target": TargetSpec,
    "dataset": DatasetSpec,
    "eval": EvalSpec,
    "deployment": DeploymentSpec,
}


class Key(NamedTuple):
    """One key; `default` is "required" for a key without a default."""

    name: str
    type: str
    default: str
    meaning: str


def list_keys(file: str) -> Iterator[Key]:
    """Yield all keys of a kind of registry file, nested ones with dots; for a target also those of all strategies."""
    yield from _list_fields(FILES[file])
    if file == "target":
        for strategy in list_strategies():
            yield from _list_fields(StrategyEntry, f"strategies.{strategy}.", skip="options")
            yield from _list_fields(resolve_strategy(strategy).options, f"strategies.{strategy}.options.")


def _list_fields(
    model: type[BaseModel], prefix: str = "", skip: str = "strategies", named: bool = False
) -> Iterator[Key]:
    """Yield the keys of a model. `named`: it has its name as a key; that of a file or of a mapping's entry is outside."""
    for name, field in model.model_fields.items():
        if name == skip or (name == "name" and not named):
            continue
        members = _split_union(field.annotation)
        models = [member for member in members if _is_model(member)]
        if len(models) < len(members):
            yield Key(
                f"{prefix}{name}", _format_type(field.annotation), _format_default(field), field.description or ""
            )
        for nested in filter(_is_model, typing.get_args(field.annotation) if _is_list(field.annotation) else ()):
            yield from _list_fields(nested, f"{prefix}{name}[].", named=True)
        if len(models) == len(members) > 1:
            yield from _list_kinds(models, f"{prefix}{name}.")
        else:
            for nested in models:
                yield from _list_fields(nested, f"{prefix}{name}.")


def _list_kinds(models: Sequence[type[BaseModel]], prefix: str) -> Iterator[Key]:
    """Yield the keys of mappings of which `kind` chooses one: those of all, then what each kind has besides."""
    kinds = [model.model_fields["kind"].default for model in models]
    yield Key(f"{prefix}kind", "one of " + ", ".join(kinds), str(kinds[0]), "")
    having: dict[Key, list[str]] = {}
    for kind, model in zip(kinds, models):
        for key in _list_fields(model, prefix):
            if key.name != f"{prefix}kind":
                having.setdefault(key, []).append(kind)
    for key, those in sorted(having.items(), key=lambda item: len(item[1]) < len(kinds)):
        yield key if len(those) == len(kinds) else key._replace(meaning=f"({', '.join(those)}) {key.meaning}")


def _split_union(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union: `X` and `None` for the optional `X | None`."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else str(value)


def _format_type(annotation: Any) -> str:
    """Format an annotation: `int | None`, `one of a, b`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _format_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(annotation)))
    if len(alternatives := _split_union(annotation)) > 1:
        return " | ".join(map(_format_type, alternatives))
    if _is_model(annotation):
        return "mapping"
    if annotation is type(None):
        return "null"
    if _is_list(annotation) and _is_model(typing.get_args(annotation)[0]):
        return "list[mapping]"
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)


def keys(file: Annotated[str, typer.Argument(help="target, dataset, eval or deployment")] = "target") -> None:
    """List every key of a registry file: type, default, meaning."""
    if file not in FILES:
        raise report_error(f"{file[:40]!r} is no registry file; {suggest_or_list(file, FILES)}")
    columns = ("key", "type", "default", "meaning")
    print_table(TextTable(f"registry: {file}", columns, tuple(map(tuple, list_keys(file)))))
