"""What a deployment reaches: object storage, schedulers, and the environment variables that its files name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from draftworks.errors import DraftworksError
from draftworks.preflight.installation.probes import Line
from draftworks.preflight.object_storage import find_storage_problems, list_storage_places
from draftworks.preflight.schedulers import find_refused_jobs, list_scheduler_users
from draftworks.storage.words import format_count, list_names
from draftworks.targets.registry import Registry

REGISTRY, STORAGE, SCHEDULERS, SECRETS = "registry", "object storage", "schedulers", "secrets"
_VARIABLE_SUFFIX = "_env"
_STORAGE_KEY = "object_storage"
"""Its variables are read with the buckets that need them, and may be absent for a public one."""


def probe_registry(registry: Registry) -> Iterator[Line]:
    """Yield whether the registry's files can be read; `draftworks check` looks at what is in them."""
    try:
        names, problems = registry.list_targets(), registry.find_problems()
    except DraftworksError as error:
        yield Line(REGISTRY, "problem", str(error), "name the folder with --registry")
        return
    for problem in problems:
        yield Line(REGISTRY, "problem", problem, "correct the file; draftworks check shows more")
    if not problems:
        yield Line(REGISTRY, "ok", f"{registry.root}: {format_count(len(names), 'target')}")


def probe_object_storage(registry: Registry, limit_s: float) -> Iterator[Line]:
    """Write a small object to each place of the deployment, and remove it."""
    places = dict(list_storage_places(registry.load_deployment()))
    if not places:
        yield Line(STORAGE, "ok", "none is used")
        return
    problems = find_storage_problems(registry, longest_wait_s=limit_s)
    for problem in problems:
        yield Line(STORAGE, "problem", problem, "look at object_storage in registry/deployment.yaml")
    if not problems:
        yield Line(STORAGE, "ok", f"writable: {', '.join(f'{key} {url}' for key, url in places.items())}")


def probe_schedulers(registry: Registry, limit_s: float) -> Iterator[Line]:
    """Ask the schedulers of all targets whether they would take their jobs."""
    names = list_scheduler_users(registry, registry.list_targets())
    if not names:
        yield Line(SCHEDULERS, "ok", "none is used: jobs run on this machine")
        return
    refused = find_refused_jobs(registry, names, limit_s)
    for name in names:
        for problem in refused.get(name, ()):
            yield Line(SCHEDULERS, "problem", problem, "draftworks check --target NAME asks again")
    taken = [name for name in names if not refused.get(name)]
    if taken:
        yield Line(SCHEDULERS, "ok", f"take the jobs of {list_names(taken, 10)}")


def probe_variables(registry: Registry, env: Mapping[str, str]) -> Iterator[Line]:
    """Yield the environment variables that the registry names and that are not set. Values are never shown."""
    named = find_named_variables(registry)
    missing = {name: keys for name, keys in named.items() if not env.get(name)}
    for name, keys in missing.items():
        todo = "set it where runs start (the environment of the daemon and of the code location as well)"
        yield Line(SECRETS, "warning", f"the environment has no {name}, which {list_names(keys, 3)} names", todo)
    if not missing:
        yield Line(SECRETS, "ok", f"set: {', '.join(named)}" if named else "no variable is named in the registry")


def find_named_variables(registry: Registry) -> dict[str, list[str]]:
    """Return the environment variables that registry files name, with the keys that name them."""
    found: dict[str, list[str]] = {}
    specs: list[tuple[str, BaseModel]] = []
    with suppress(DraftworksError):
        specs.append(("deployment", registry.load_deployment()))
    for name in registry.list_targets():
        try:
            specs.append((f"target {name}", registry.load_target(name)))
        except DraftworksError:
            continue
    for where, spec in specs:
        for key, variable in _iterate_variables(spec.model_dump(warnings=False)):
            found.setdefault(variable, []).append(f"{where}: {key}")
    return found


def _iterate_variables(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of each setting whose name says that it is the name of a variable."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if name != _STORAGE_KEY:
                yield from _iterate_variables(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _iterate_variables(value, key)
    elif isinstance(values, str) and values and key.endswith(_VARIABLE_SUFFIX):
        yield key, values
