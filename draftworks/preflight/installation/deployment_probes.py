"""What a deployment reaches: folders, Dagster, object storage, schedulers, secrets; and what was left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from draftworks.errors import DraftworksError
from draftworks.preflight.findings import Finding
from draftworks.preflight.services import (
    find_existing,
    find_refused_jobs,
    find_storage_problems,
    list_scheduler_users,
    list_storage_places,
)
from draftworks.storage.artifacts import LOCK, PARTIAL, POINTER, RECORD, SCHEMA_VERSION
from draftworks.storage.files import read_json
from draftworks.storage.lease import LeasePath, LeaseState
from draftworks.storage.shared_folder import MAX_SKEW_S, REFUSED_SKEW_S, find_mount, measure_clock_lead
from draftworks.storage.words import format_count, list_names
from draftworks.targets.registry import Registry

REGISTRY, STORAGE, SCHEDULERS, SECRETS = "registry", "object storage", "schedulers", "secrets"
_VARIABLE_SUFFIX = "_env"
_STORAGE_KEY = "object_storage"
"""Its variables are read with the buckets that need them, and may be absent for a public one."""


def probe_registry(registry: Registry) -> Iterator[Finding]:
    """Yield whether the registry's files can be read; `draftworks check` looks at what is in them."""
    try:
        names, problems = registry.list_targets(), registry.find_problems()
    except DraftworksError as error:
        yield Finding("error", str(error), REGISTRY, "name the folder with --registry")
        return
    for problem in problems:
        yield Finding("error", problem, REGISTRY, "correct the file; draftworks check shows more")
    if not problems:
        yield Finding("ok", f"{registry.root}: {format_count(len(names), 'target')}", REGISTRY)


def probe_object_storage(registry: Registry, limit_s: float) -> Iterator[Finding]:
    """Write a small object to each place of the deployment, and remove it."""
    places = dict(list_storage_places(registry.load_deployment()))
    if not places:
        yield Finding("ok", "none is used", STORAGE)
        return
    problems = find_storage_problems(registry, longest_wait_s=limit_s)
    for problem in problems:
        yield Finding("error", problem, STORAGE, "look at object_storage in registry/deployment.yaml")
    if not problems:
        yield Finding("ok", f"writable: {', '.join(f'{key} {url}' for key, url in places.items())}", STORAGE)


def probe_schedulers(registry: Registry, limit_s: float) -> Iterator[Finding]:
    """Ask the schedulers of all targets whether they would take their jobs."""
    names = list_scheduler_users(registry, registry.list_targets())
    if not names:
        yield Finding("ok", "none is used: jobs run on this machine", SCHEDULERS)
        return
    refused = find_refused_jobs(registry, names, limit_s)
    for name in names:
        for problem in refused.get(name, ()):
            yield Finding("error", problem, SCHEDULERS, "draftworks check --target NAME asks again")
    taken = [name for name in names if not refused.get(name)]
    if taken:
        yield Finding("ok", f"take the jobs of {list_names(taken, 10)}", SCHEDULERS)


def probe_variables(registry: Registry, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the environment variables that the registry names and that are not set. Values are never shown."""
    named = find_named_variables(registry)
    missing = {name: keys for name, keys in named.items() if not env.get(name)}
    for name, keys in missing.items():
        todo = "set it where runs start (the environment of the daemon and of the code location as well)"
        yield Finding("warning", f"the environment has no {name}, which {list_names(keys, 3)} names", SECRETS, todo)
    if not missing:
        yield Finding("ok", f"set: {', '.join(named)}" if named else "no variable is named in the registry", SECRETS)


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


DAGSTER = "dagster"
PROGRAM = "jobs.instance_report"


def probe_dagster(registry: Path, env: Mapping[str, str], checkout: Path, limit_s: float) -> Iterator[Finding]:
    """Yield the lines of `python -m jobs.instance_report`; those that it wrote in time, where it takes too long."""
    started = time.monotonic()
    with TemporaryFile() as out, TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(registry)],
            env=dict(env),
            cwd=checkout,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        out.seek(0)
        errors.seek(0)
        lines = [line for line in map(_parse, out.read().decode(errors="replace").splitlines()) if line is not None]
        last = (errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
    yield from lines
    if code is None:
        todo = "is its database, or this machine, busy? dagster instance info shows the instance"
        waited = time.monotonic() - started
        yield Finding("warning", f"instance and code location were not looked at within {waited:.0f} s", DAGSTER, todo)
    elif code:
        yield Finding(
            "error", f"Dagster cannot be looked at: {last}", DAGSTER, "look at: python -m jobs.instance_report"
        )


def _parse(text: str) -> Finding | None:
    """Return a line of the program; None for what libraries print."""
    try:
        return Finding(**json.loads(text))
    except (ValueError, TypeError):
        return None


LEFTOVERS, STORES = "leftovers", "stores"
SILENT_S = 600.0
"""A lease of another host that was not renewed for so long is stale: it is renewed every few seconds."""
OLD_S = 7 * 24 * 3600.0
_DIGEST = re.compile(r"[0-9a-f]{16}")


def probe_leftovers(var: Path) -> Iterator[Finding]:
    """Yield locks of processes that are gone, and interrupted results that nothing has continued for a week."""
    counted, silent = Counter[LeaseState](), []
    for lock in sorted(var.glob(f"*/*/{LOCK}")):
        with suppress(OSError):
            state = LeasePath(lock).look()
            counted[state] += 1
            if state is LeaseState.WATCHED and _seconds_since_change(lock) > SILENT_S:
                silent.append(f"{lock} ({LeasePath(lock).describe_holder()})")
    if silent:
        todo = "nothing if that host is gone: the next run waits a minute, then takes them over; else look at the host"
        yield Finding("warning", f"locks that another host has not renewed: {list_names(silent)}", LEFTOVERS, todo)
    ended = counted[LeaseState.ENDED]
    taken = f"{ended} of processes that are gone, which the next run takes over" if ended else "none of a dead process"
    yield Finding("ok", f"locks: {counted[LeaseState.HELD]} held on this machine, {taken}", LEFTOVERS)
    old = [path for path in var.glob(f"*/*/*{PARTIAL}") if _seconds_since_change(path) > OLD_S]
    if old:
        todo = "run the same job again to go on with them, or remove them: draftworks prune --yes"
        names = list_names(path.relative_to(var) for path in sorted(old))
        yield Finding(
            "warning", f"{format_count(len(old), 'result')}, interrupted more than a week ago: {names}", LEFTOVERS, todo
        )


def probe_stores(var: Path) -> Iterator[Finding]:
    """Yield results and feature stores that another version of Draftworks wrote."""
    if not var.is_dir():
        yield Finding("ok", f"{var}: nothing was made yet", STORES)
        return
    current, others, damaged = 0, [], []
    for pointer in sorted(var.glob(f"*/*/{POINTER}")):
        current += 1
        try:
            record = pointer.parent / str(read_json(pointer)["digest"]) / RECORD
            version = read_json(record)["schema"]
        except (OSError, ValueError, KeyError, TypeError):
            damaged.append(str(pointer.parent.relative_to(var)))
            continue
        if version != SCHEMA_VERSION:
            others.append(f"{record.relative_to(var)} (schema {version})")
    if others:
        todo = "use the version of Draftworks that wrote them, or run the jobs again"
        yield Finding("error", f"expected schema {SCHEMA_VERSION}, found others: {list_names(others)}", STORES, todo)
    if damaged:
        todo = "run the jobs that make them again"
        yield Finding("error", f"results whose record cannot be read: {list_names(damaged)}", STORES, todo)
    if not others and not damaged:
        yield Finding("ok", f"{current} current results, all of this version", STORES)
    stores = sorted((var / "feature_store").glob("*/"))
    linked = {path.resolve().name for path in stores if path.is_symlink()}
    named = [path.name for path in stores if _is_named_store(path) and path.name not in linked]
    if named:
        found = f"feature stores of an earlier version, by target name, that nothing reads: {list_names(named)}"
        todo = "link each to the digest of its target's weights, or remove it: a run without features says the command"
        yield Finding("warning", found, STORES, todo)


def _is_named_store(path: Path) -> bool:
    return not path.is_symlink() and _DIGEST.fullmatch(path.name) is None


def _seconds_since_change(path: Path) -> float:
    """Return how long ago a folder, or the newest entry in it, was changed."""
    try:
        newest = max([path.stat().st_mtime, *(one.stat().st_mtime for one in path.iterdir())])
    except OSError:
        return 0.0
    return time.time() - newest


DISK, PERMISSIONS, CLOCKS = "disk", "permissions", "clocks"
PREFIX = ".doctor-"
"""Begin of the names of the files that are tried with."""
LEAST_BYTES = 1 << 30
"""With less free a run would fail before long."""
LOW_BYTES = 20 << 30
"""A checkpoint or a shard of features of a large target may not fit any more."""
LEAST_FILES = 10_000
LOW_SHARE = 0.05


@dataclass(frozen=True)
class WrittenFolder:
    """A folder that runs write to.

    Attributes:
        name: what a user calls it, such as `var`.
        is_needed: whether every run writes to it.
    """

    name: str
    path: Path
    is_needed: bool = True


def list_written_folders(registry: Registry, env: Mapping[str, str], checkout: Path) -> list[WrittenFolder]:
    """Return `var`, the feature store, DAGSTER_HOME and the caches of libraries."""
    found = [WrittenFolder("DAGSTER_HOME", Path(env.get("DAGSTER_HOME") or checkout / ".dagster"))]
    with suppress(DraftworksError):  # another probe says what is wrong with the deployment
        deployment = registry.load_deployment()
        found.insert(0, WrittenFolder("var", registry.resolve_path(deployment.var)))
        if deployment.features.root is not None:
            found.insert(1, WrittenFolder("feature store", registry.resolve_path(deployment.features.root)))
    hub = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return [*found, WrittenFolder("Hugging Face cache", Path(hub), is_needed=False)]


def probe_disk(folder: WrittenFolder) -> Iterator[Finding]:
    """Yield how much is free in a folder, and what is low."""
    existing = find_existing(folder.path)
    usage, stats = shutil.disk_usage(existing), os.statvfs(existing)
    free = f"{folder.name} {folder.path}: {usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free"
    todo = "draftworks usage shows what takes room, draftworks prune --yes removes what nothing in use was made from"
    if stats.f_files and stats.f_favail < LEAST_FILES:
        yield Finding("error", f"{folder.name} {folder.path}: room for {stats.f_favail:,} more files", DISK, todo)
    if usage.free < LEAST_BYTES:
        yield Finding("error" if folder.is_needed else "warning", free, DISK, todo)
    elif usage.free < LOW_BYTES or usage.free < LOW_SHARE * usage.total:
        yield Finding("warning", free, DISK, todo)
    else:
        yield Finding("ok", free, DISK)


def probe_permissions(folder: WrittenFolder) -> Iterator[Finding]:
    """Try in a folder what runs do there: write, rename over a file, lock, link. Nothing of it stays."""
    where, existing = f"{folder.name} {folder.path}", find_existing(folder.path)
    severity = "error" if folder.is_needed else "warning"
    if not existing.is_dir():
        todo = "move the file away, or name another folder"
        yield Finding(severity, f"{where}: {existing} is a file, not a folder", PERMISSIONS, todo)
        return
    trial = existing / f"{PREFIX}{uuid4().hex}"
    try:
        missing = _try_writing(trial)
    except OSError as error:
        todo = f"give user {os.getuid()} the right to write to {existing}, mount it writable, or name another folder"
        yield Finding(severity, f"{where}: cannot be written to: {error.strerror or error}", PERMISSIONS, todo)
        return
    finally:
        for path in existing.glob(f"{trial.name}*"):
            with suppress(OSError):
                path.unlink()
    mount = find_mount(existing)
    kind = "" if mount is None else f" ({mount.kind})"
    later = "" if folder.path.is_dir() else f"; does not exist yet, can be made in {existing}"
    if missing:
        todo = "use another file system: two runs could write the same result"
        yield Finding("error", f"{where}{kind}: no {', no '.join(missing)}", PERMISSIONS, todo)
    else:
        yield Finding("ok", f"{where}{kind}: writable, with atomic rename and locks{later}", PERMISSIONS)
    if folder.name == "DAGSTER_HOME" and mount is not None and mount.is_shared:
        todo = "use a local folder, or Postgres (docs/how-to/deployment.md)"
        yield Finding("warning", f"{where}: SQLite on {mount.kind} may be damaged by two hosts", PERMISSIONS, todo)


def probe_clock_of_folder(folder: WrittenFolder) -> Iterator[Finding]:
    """Compare this host's clock with that of the server of a folder that other hosts may mount."""
    existing = find_existing(folder.path)
    mount = find_mount(existing)
    if mount is None or not mount.is_shared:
        return
    trial = existing / f"{PREFIX}{uuid4().hex}"
    try:
        ahead_s = measure_clock_lead(trial, "")
    except OSError:
        return  # the probe of permissions says so
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
    found = f"this host is {ahead_s:+.1f} s from the server of {folder.name} ({mount.kind})"
    if abs(ahead_s) <= MAX_SKEW_S:
        yield Finding("ok", found, CLOCKS)
    else:
        todo = f"set the clocks by NTP: more than {REFUSED_SKEW_S:.0f} s between the hosts of a job is refused"
        yield Finding("error" if abs(ahead_s) > REFUSED_SKEW_S else "warning", found, CLOCKS, todo)


def _try_writing(trial: Path) -> list[str]:
    """Write a file, then try rename, locks and links with it; return what does not work. Raises OSError if it cannot."""
    other, missing = trial.with_name(f"{trial.name}-old"), list[str]()
    trial.write_bytes(b"new" * 1000)
    other.write_bytes(b"old")
    os.replace(trial, other)
    if trial.exists() or other.read_bytes()[:3] != b"new":
        missing.append("atomic rename")
    if not _is_lock_exclusive(other):
        missing.append("locks (flock)")
    handle = os.open(other, os.O_RDWR)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        missing.append("locks (fcntl, for SQLite)")
    finally:
        os.close(handle)
    return missing


def _is_lock_exclusive(path: Path) -> bool:
    """Whether a second handle is refused a lock that a first one holds."""
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    except OSError:
        return False
    finally:
        os.close(first)
        os.close(second)
