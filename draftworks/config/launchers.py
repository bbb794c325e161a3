"""Where torchrun jobs run: the kinds of launchers, and the merge of the deployment's settings with a target's. Torch-free.

Nothing here is part of any identity: where a result was computed does not decide what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from draftworks.config.kubernetes_launcher import KubernetesLauncherSpec
from draftworks.config.launcher_base import LauncherSpec, SchedulerLauncherSpec
from draftworks.config.plain_errors import show
from draftworks.config.ray_launcher import RayLauncherSpec
from draftworks.config.slurm_launcher import SlurmLauncherSpec
from draftworks.config.validation import parse_spec
from draftworks.errors import ConfigError
from draftworks.storage.suggestions import suggest, suggest_or_list

__all__ = [
    "AnyLauncherSpec",
    "KubernetesLauncherSpec",
    "LauncherSpec",
    "LocalLauncherSpec",
    "RayLauncherSpec",
    "SchedulerLauncherSpec",
    "SlurmLauncherSpec",
    "check_overrides",
    "merge_launcher",
    "parse_launcher",
]


class LocalLauncherSpec(LauncherSpec):
    """Jobs run on this machine, as children of the step that started them."""

    kind: Literal["local"] = "local"


AnyLauncherSpec = LocalLauncherSpec | SlurmLauncherSpec | KubernetesLauncherSpec | RayLauncherSpec
"""The union of the kinds that a deployment may choose. A kind is added here when its launcher exists."""
KINDS: dict[str, type[LauncherSpec]] = {each.model_fields["kind"].default: each for each in get_args(AnyLauncherSpec)}
LOCAL = "local"
PROGRAMS = ("regenerate", "plan", "capture", "train", "produce", "memory", "evaluate", "export", "serve")
"""Programs whose jobs a launcher runs, by which settings may differ."""
COMMON_KEYS = frozenset(LauncherSpec.model_fields) - {"kind", "programs"}
"""Keys that every kind has; those that an override of `kind` inherits."""


def parse_launcher(values: Mapping[str, Any], where: str) -> LauncherSpec:
    """Return the settings of one launcher; `kind` is local if it is not given.

    Raises:
        ConfigError: unknown kind, a key that this kind does not have, a bad value, or a program's settings that have one.
    """
    spec = _parse_kind(values, where)
    for program, own in spec.programs.items():
        _require_program(program, f"{where}.programs")
        _parse_kind(_merge([_get_own(spec), own]), f"{where}.programs.{program}")
    return spec


def merge_launcher(deployment: LauncherSpec, target: Mapping[str, Any], program: str, where: str) -> LauncherSpec:
    """Return the settings for the jobs of one program of one target, merged key by key.

    A later layer counts before an earlier one: the deployment, its `programs` entry, the target, its `programs` entry.
    Mappings are merged too, lists are replaced. A layer that changes `kind` inherits the common keys only.

    Args:
        where: place of the target's settings, for messages.

    Raises:
        ConfigError: see `parse_launcher`.
    """
    layers = [_get_own(deployment), deployment.programs.get(program, {}), *_list_layers(target, program)]
    return _parse_kind(_merge(layers), where)


def check_overrides(deployment: LauncherSpec, target: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a target's settings cannot be merged into the deployment's, for whatever program."""
    programs = target.get("programs", {})
    if not isinstance(programs, Mapping) or not all(isinstance(own, Mapping) for own in programs.values()):
        raise ConfigError(f"{where}.programs: expected settings by program, found {show(programs, 40)}")
    for program in programs:
        _require_program(program, f"{where}.programs")
    for program in PROGRAMS:
        merge_launcher(deployment, target, program, f"{where}.programs.{program}" if program in programs else where)


def _list_layers(target: Mapping[str, Any], program: str) -> list[Mapping[str, Any]]:
    return [
        {key: value for key, value in target.items() if key != "programs"},
        target.get("programs", {}).get(program, {}),
    ]


def _get_own(spec: LauncherSpec) -> dict[str, Any]:
    """Return the keys that a file gave, without those by program."""
    return {**spec.model_dump(exclude_unset=True, exclude={"programs"}), "kind": spec.kind}


def _merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        if merged and layer.get("kind", merged["kind"]) != merged["kind"]:
            merged = {key: value for key, value in merged.items() if key in COMMON_KEYS}
        merged = _merge_mappings(merged, layer)
    return merged


def _merge_mappings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _merge_mappings(old, value)
        merged[key] = value
    return merged


def _parse_kind(values: Mapping[str, Any], where: str) -> LauncherSpec:
    kind = values.get("kind", LOCAL)
    if not isinstance(kind, str) or kind not in KINDS:
        hint = suggest(kind, KINDS)
        found = f"{where}: kind: expected one of {', '.join(KINDS)}, found {show(kind)}"
        raise ConfigError(f"{found}; {hint}" if hint else found)
    keys = KINDS[kind].model_fields
    for key in values:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key}; {_suggest_key(key, kind)}")
    return parse_spec(KINDS[kind], dict(values), where)


def _require_program(program: str, where: str) -> None:
    if program not in PROGRAMS:
        raise ConfigError(f"{where}: unknown program {program}; {suggest_or_list(program, PROGRAMS)}")


def _suggest_key(key: str, kind: str) -> str:
    """Return what a key may be that this kind does not have: the same key of another kind, or one like it of this one."""
    others = [other for other, spec in KINDS.items() if key in spec.model_fields]
    if others:
        return f"it is one of kind {' and '.join(others)}, and the kind here is {kind}"
    own = list(KINDS[kind].model_fields)
    every = {*own, *(name for spec in KINDS.values() for name in spec.model_fields)}
    return suggest(key, every) or suggest_or_list(key, own)
