"""Asks what a run will need and this process can reach, before its first step that makes something: schedulers, storage."""

from __future__ import annotations

from typing import Any

from draftworks.errors import ConfigError, DraftworksError
from draftworks.preflight.object_storage import FEATURES, PUBLISH, find_storage_problems
from draftworks.targets.registry import Registry
from resources.launcher_checks import find_launcher_problems
from spec_assets.pools import PROGRAM_TAG

_WRITTEN_BY = {FEATURES: "capture", PUBLISH: "evaluate"}
"""By each place in object storage, the program of the steps that write there."""


def require_places(plan: Any, target: str | None, registry: Registry) -> None:
    """Raise if a scheduler or object storage that the steps of a plan use cannot be reached, or refuses.

    It costs nothing where jobs run on this machine and features are in files. What cannot be read of the target's
    entry is left to its first step.

    Raises:
        ConfigError: all that was found.
    """
    programs = {step.tags[PROGRAM_TAG] for step in plan.steps if PROGRAM_TAG in (step.tags or {})}
    if target is None or not programs:
        return
    try:
        spec = registry.load_target(target)
        problems = find_launcher_problems(spec, registry, programs)
        problems += find_storage_problems(registry, [key for key, by in _WRITTEN_BY.items() if by in programs])
    except DraftworksError:
        return
    if problems:
        raise ConfigError("\n".join(problems))
