"""What earlier processes and versions left in `var`: locks, interrupted results, records and stores of other versions."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from draftworks.preflight.installation.probes import Line
from draftworks.storage.artifacts import LOCK, PARTIAL, POINTER, RECORD, SCHEMA_VERSION
from draftworks.storage.lease import LeasePath
from draftworks.storage.lease_file import LeaseState
from draftworks.storage.regular_files import read_json
from draftworks.storage.words import format_count, list_names

LEFTOVERS, STORES = "leftovers", "stores"
SILENT_S = 600.0
"""A lease of another host that was not renewed for so long is stale: it is renewed every few seconds."""
OLD_S = 7 * 24 * 3600.0
_DIGEST = re.compile(r"[0-9a-f]{16}")


def probe_leftovers(var: Path) -> Iterator[Line]:
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
        yield Line(LEFTOVERS, "warning", f"locks that another host has not renewed: {list_names(silent)}", todo)
    ended = counted[LeaseState.ENDED]
    taken = f"{ended} of processes that are gone, which the next run takes over" if ended else "none of a dead process"
    yield Line(LEFTOVERS, "ok", f"locks: {counted[LeaseState.HELD]} held on this machine, {taken}")
    old = [path for path in var.glob(f"*/*/*{PARTIAL}") if _seconds_since_change(path) > OLD_S]
    if old:
        todo = "run the same job again to go on with them, or remove them: draftworks prune --yes"
        names = list_names(path.relative_to(var) for path in sorted(old))
        yield Line(
            LEFTOVERS, "warning", f"{format_count(len(old), 'result')}, interrupted more than a week ago: {names}", todo
        )


def probe_stores(var: Path) -> Iterator[Line]:
    """Yield results and feature stores that another version of Draftworks wrote."""
    if not var.is_dir():
        yield Line(STORES, "ok", f"{var}: nothing was made yet")
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
        yield Line(STORES, "problem", f"expected schema {SCHEMA_VERSION}, found others: {list_names(others)}", todo)
    if damaged:
        todo = "run the jobs that make them again"
        yield Line(STORES, "problem", f"results whose record cannot be read: {list_names(damaged)}", todo)
    if not others and not damaged:
        yield Line(STORES, "ok", f"{current} current results, all of this version")
    named = [path.name for path in sorted((var / "feature_store").glob("*/")) if _is_named_store(path)]
    if named:
        found = f"feature stores of an earlier version, by target name: {list_names(named)}"
        yield Line(STORES, "ok", f"{found}; they are joined to the present ones when next used")


def _is_named_store(path: Path) -> bool:
    return not path.is_symlink() and _DIGEST.fullmatch(path.name) is None


def _seconds_since_change(path: Path) -> float:
    """Return how long ago a folder, or the newest entry in it, was changed."""
    try:
        newest = max([path.stat().st_mtime, *(one.stat().st_mtime for one in path.iterdir())])
    except OSError:
        return 0.0
    return time.time() - newest
