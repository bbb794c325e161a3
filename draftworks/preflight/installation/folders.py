"""Folders that runs write to: room, permissions, rename and locks, tried with a file that is removed again."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from draftworks.errors import DraftworksError
from draftworks.preflight.installation.probes import Line
from draftworks.preflight.streams import find_existing
from draftworks.storage.file_systems import find_mount
from draftworks.storage.shared_folder import MAX_SKEW_S, REFUSED_SKEW_S, measure_clock_lead
from draftworks.targets.registry import Registry

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


def probe_disk(folder: WrittenFolder) -> Iterator[Line]:
    """Yield how much is free in a folder, and what is low."""
    existing = find_existing(folder.path)
    usage, stats = shutil.disk_usage(existing), os.statvfs(existing)
    free = f"{folder.name} {folder.path}: {usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB free"
    todo = "draftworks usage shows what takes room, draftworks prune --yes removes what nothing in use was made from"
    if stats.f_files and stats.f_favail < LEAST_FILES:
        yield Line(DISK, "problem", f"{folder.name} {folder.path}: room for {stats.f_favail:,} more files", todo)
    if usage.free < LEAST_BYTES:
        yield Line(DISK, "problem" if folder.is_needed else "warning", free, todo)
    elif usage.free < LOW_BYTES or usage.free < LOW_SHARE * usage.total:
        yield Line(DISK, "warning", free, todo)
    else:
        yield Line(DISK, "ok", free)


def probe_permissions(folder: WrittenFolder) -> Iterator[Line]:
    """Try in a folder what runs do there: write, rename over a file, lock, link. Nothing of it stays."""
    where, existing = f"{folder.name} {folder.path}", find_existing(folder.path)
    state = "problem" if folder.is_needed else "warning"
    if not existing.is_dir():
        todo = "move the file away, or name another folder"
        yield Line(PERMISSIONS, state, f"{where}: {existing} is a file, not a folder", todo)
        return
    trial = existing / f"{PREFIX}{uuid4().hex}"
    try:
        missing = _try_writing(trial)
    except OSError as error:
        todo = f"give user {os.getuid()} the right to write to {existing}, mount it writable, or name another folder"
        yield Line(PERMISSIONS, state, f"{where}: cannot be written to: {error.strerror or error}", todo)
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
        yield Line(PERMISSIONS, "problem", f"{where}{kind}: no {', no '.join(missing)}", todo)
    else:
        yield Line(PERMISSIONS, "ok", f"{where}{kind}: writable, with atomic rename and locks{later}")
    if folder.name == "DAGSTER_HOME" and mount is not None and mount.is_shared:
        todo = "use a local folder, or Postgres (docs/how-to/deployment.md)"
        yield Line(PERMISSIONS, "warning", f"{where}: SQLite on {mount.kind} may be damaged by two hosts", todo)


def probe_clock_of_folder(folder: WrittenFolder) -> Iterator[Line]:
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
        yield Line(CLOCKS, "ok", found)
    else:
        todo = f"set the clocks by NTP: more than {REFUSED_SKEW_S:.0f} s between the hosts of a job is refused"
        yield Line(CLOCKS, "problem" if abs(ahead_s) > REFUSED_SKEW_S else "warning", found, todo)


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
