"""Validates the values of a user's file against a model.

Each problem is one line with the file, the key, the expected and the found value.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from draftworks.config.base import SpecType
from draftworks.config.strict_yaml import read_mapping
from draftworks.errors import ConfigError

CREDENTIALS = re.compile(r"//[^/\s]*@")
"""Credentials in a URL; error messages mask them."""
SECRET = "_key_env"
"""Suffix of keys whose value is not shown in messages, since users write a secret there by mistake."""


def load_yaml(path: Path, model: type[SpecType], **extra: Any) -> SpecType:
    """Read one registry file into `model`; `extra` adds fields that follow from elsewhere, such as the file's name.

    Raises:
        ConfigError: unreadable file, bad YAML (see `strict_yaml`), unknown key (closest names suggested), bad value, or
            a value in the file that differs from the one in `extra`.
    """
    raw = read_mapping(path)
    given = [key for key in extra if key in raw and raw[key] != extra[key]]
    if given:
        raise ConfigError(f"{path}: {given[0]} follows from the name of the file, {extra[given[0]]}: leave the key out")
    return parse_spec(model, {**raw, **extra}, where=str(path))


def parse_spec(model: type[SpecType], values: dict[str, Any], where: str) -> SpecType:
    """Return `model(**values)`. Raises one ConfigError for all problems, each line beginning with `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error, model, where)) from error


def describe_validation_error(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Return one line per problem: where, what is wrong, what was found, and the closest keys for an unknown one."""
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            hint = _suggest_keys(problem["loc"][-1], _list_keys_at(model, problem["loc"][:-1]))
            lines.append(f"{where}: unknown key {key}{hint}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: key {key} is missing")
        else:
            message = ": ".join(filter(None, (where, key, problem["msg"].removeprefix("Value error, "))))
            allowed = []
            if problem["type"] == "literal_error":
                allowed = re.findall("'([^']*)'", problem.get("ctx", {}).get("expected", ""))
            hint = _suggest_keys(problem["input"], allowed)
            found = " (not shown)" if key.endswith(SECRET) else f" (found {_short(problem['input'])})"
            # If several keys contradict each other, the message already contains their values.
            together = problem["type"] == "value_error" and isinstance(problem["input"], dict)
            lines.append(f"{message}{'' if together else found}{hint}")
    return "\n".join(lines)


def _suggest_keys(found: Any, known: list[str]) -> str:
    close = difflib.get_close_matches(str(found), known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _list_keys_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the field names of the nested model at a location of `model`; empty if there is no model."""
    current: Any = model
    for part in location:
        field = getattr(current, "model_fields", {}).get(part)
        candidates = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        found = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if found:
            current = found[0]
        elif field is None and current is not model:
            continue  # a key in a dict of models, as in `strategies.eagle3`
    return list(getattr(current, "model_fields", {}))


def _short(value: Any) -> str:
    text = CREDENTIALS.sub("//***@", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."
