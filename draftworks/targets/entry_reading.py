"""Reads a target's entry with all that is wrong with it, and what is left without that. Torch-free."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from pydantic import BaseModel, ValidationError

from draftworks.config.base import SpecType
from draftworks.config.launchers import check_overrides
from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import StrategyEntry, TargetSpec
from draftworks.config.strategies import list_option_models, resolve_strategy
from draftworks.config.strict_yaml import Beside, describe_validation_error, read_mapping
from draftworks.errors import ConfigError

_MOST_ROUNDS = 50


@dataclass(frozen=True)
class Parsed(Generic[SpecType]):
    """Values that were parsed as far as they are right.

    Attributes:
        spec: without the values that are wrong, whose keys have their defaults; None if nothing is left without them.
        problems: a line for each.
    """

    spec: SpecType | None
    problems: tuple[str, ...] = ()


def read_entry(path: Path, name: str, find_deployment: Callable[[], DeploymentSpec | None]) -> Parsed[TargetSpec]:
    """Read a target's file.

    Args:
        find_deployment: called for an entry with launcher settings, which are merged into the deployment's; None judges
            them not.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.
    """
    raw = read_mapping(path)
    if raw.get("name", name) != name:
        raise ConfigError(f"{path}: name follows from the name of the file, {name}: leave the key out")
    parsed = parse_all(TargetSpec, {**raw, "name": name}, str(path), list_option_models)
    if parsed.spec is None:
        return parsed
    problems, kept = [*parsed.problems], dict[str, StrategyEntry]()
    for strategy, entry in parsed.spec.strategies.items():
        read = _read_strategy(path, strategy, entry)
        problems += read.problems
        if read.spec is not None:
            kept[strategy] = read.spec
    spec = parsed.spec.model_copy(update={"strategies": kept}) if kept != parsed.spec.strategies else parsed.spec
    problems += _find_swap_problems(path, spec)
    deployment = find_deployment() if spec.launcher else None
    if deployment is not None:
        try:
            check_overrides(deployment.launcher, spec.launcher, f"{path}: launcher")
        except ConfigError as error:
            problems += str(error).splitlines()
            spec = spec.model_copy(update={"launcher": {}})
    return Parsed(spec, tuple(problems))


def _find_swap_problems(path: Path, spec: TargetSpec) -> list[str]:
    """Return a line if a running server is to load a format that its strategy does not have."""
    swap = None if spec.service is None else spec.service.swap
    wanted = next(iter(spec.strategies), None) if swap is None or swap.strategy is None else swap.strategy
    if swap is None or swap.format is None or wanted not in spec.strategies:
        return []
    try:
        resolve_strategy(wanted).export(swap.format)
    except ConfigError as error:
        return [f"{path}: service.swap.format: {error}"]
    return []


def _read_strategy(path: Path, name: str, entry: StrategyEntry) -> Parsed[StrategyEntry]:
    """Check a strategy's options and export formats; both are known only once the strategy is."""
    try:
        strategy = resolve_strategy(name)
    except ConfigError as error:
        return Parsed(None, (f"{path}: strategies: {error}",))
    where = f"{path}: strategies.{name}"
    problems: list[str] = []
    changes: dict[str, Any] = {}
    try:
        strategy.parse_options(entry.options, where=f"{where}.options")
    except ConfigError as error:
        problems += [line if str(path) in line else f"{path}: {line}" for line in str(error).splitlines()]
        options = parse_all(strategy.options, dict(entry.options), where).spec
        known = (
            {}
            if options is None
            else {key: entry.options[key] for key in options.model_fields_set & entry.options.keys()}
        )
        changes["options"] = known
    formats = []
    for each in entry.export.formats or ():
        try:
            formats.append(strategy.export(each).name)
        except ConfigError as error:
            problems.append(f"{path}: strategies: {error}")
    if entry.export.formats is not None and formats != entry.export.formats:
        changes["export"] = entry.export.model_copy(update={"formats": formats or None})
    return Parsed(entry.model_copy(update=changes) if changes else entry, tuple(problems))


def parse_all(model: type[SpecType], values: Mapping[str, Any], where: str, beside: Beside = dict) -> Parsed[SpecType]:
    """Parse values, again without those that are wrong, until the rest is right: some are judged once others are."""
    left, problems, removed = copy.deepcopy(dict(values)), list[str](), set[tuple[Any, ...]]()
    for _ in range(_MOST_ROUNDS):
        try:
            return Parsed(model.model_validate(left), tuple(dict.fromkeys(problems)))
        except ValidationError as error:
            found = [problem["loc"] for problem in error.errors()]
            if not removed.issuperset(found):  # else a key is missing that was there, with a wrong value
                problems += describe_validation_error(error, model, where, beside).splitlines()
            removed.update(found)
            done = [_remove(left, location) for location in found]
            if not all(done):
                break
    return Parsed(None, tuple(dict.fromkeys(problems)))


def _remove(values: dict[str, Any], location: tuple[Any, ...]) -> bool:
    """Remove the value at a location, or the nearest one around it that has a key; False if there is none."""
    at: Any = values
    found: tuple[dict[str, Any], str] | None = None
    for part in location:  # parts that no mapping has are tags of unions
        if isinstance(at, dict) and part in at:
            found, at = (at, part), at[part]
        elif isinstance(at, list | BaseModel):
            break
    if found is not None:
        found[0].pop(found[1], None)
    return found is not None
