"""Validates the values of a user's file against a model.

Each problem is one line with the file, the key, the expected and the found value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from draftworks.config.base import SpecType
from draftworks.config.plain_errors import Beside, PlainErrors
from draftworks.config.strict_yaml import read_mapping
from draftworks.errors import ConfigError


def load_yaml(path: Path, model: type[SpecType], beside: Beside = dict, **extra: Any) -> SpecType:
    """Read one registry file into `model`; `extra` adds fields that follow from elsewhere, such as the file's name.

    Raises:
        ConfigError: unreadable file, bad YAML (see `strict_yaml`), unknown key (closest names suggested), bad value, or
            a value in the file that differs from the one in `extra`.
    """
    raw = read_mapping(path)
    given = [key for key in extra if key in raw and raw[key] != extra[key]]
    if given:
        raise ConfigError(f"{path}: {given[0]} follows from the name of the file, {extra[given[0]]}: leave the key out")
    return parse_spec(model, {**raw, **extra}, where=str(path), beside=beside)


def parse_spec(model: type[SpecType], values: dict[str, Any], where: str, beside: Beside = dict) -> SpecType:
    """Return `model(**values)`. Raises one ConfigError for all problems, each line beginning with `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, model, where, beside)) from error


def describe_validation_error(error: ValidationError, model: type[BaseModel], where: str, beside: Beside = dict) -> str:
    """Return one line per problem: where, what is wrong, what was found, and what may be meant."""
    plain = PlainErrors(model, where, beside)
    return "\n".join(plain.describe(problem) for problem in error.errors())
