"""A value of a pydantic field that is not the one it has, by its annotation."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel


def another(spec: BaseModel, name: str) -> Any:
    """A value of a field that is not the one it has."""
    value, annotation = getattr(spec, name), type(spec).model_fields[name].annotation
    return _another(value, annotation, f"{type(spec).__name__}.{name}")


def _another(value: Any, annotation: Any, where: str) -> Any:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _another(value, parts[0], where)
    if origin is Literal:
        return next(each for each in parts if each != value)
    if origin in (typing.Union, types.UnionType):
        return _another(value, next(each for each in parts if each is not type(None)), where)
    if origin is list:
        return [*(value or ()), {str: "other", int: 1, float: 0.5}[parts[0]]]
    if origin is dict:
        return {**(value or {}), "other": 1}
    if annotation is bool:
        return not value
    if annotation in (int, float):
        return 3 if value is None else value + 1
    if annotation is str:
        return f"{value or ''}x"
    raise AssertionError(f"{where}: give another value of {annotation} in `values`")
