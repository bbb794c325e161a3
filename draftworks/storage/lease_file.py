"""Files that say that a living process holds something, on any file system that several hosts share. Torch-free.

A lease file names its process. While the process holds it, a thread sets the file's times every few seconds. Another process
of the same machine looks whether the process lives; one elsewhere watches the file's times. It measures with its own clock
how long they have not changed, so that the clocks of hosts need not agree.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from uuid import uuid4

from draftworks.storage.process_place import Place, ProcessPlace

LONGEST_GAP_S = 5.0
"""Longest time between two looks that counts as watched: the file server, or the watcher, may have stood still."""
STAGING = ".lease-"
"""Begin of the names of lease files that have no name yet."""
_MAX_BYTES = 4096
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_GONE = (errno.ENOENT, errno.ESTALE)
_RELEASED = b"-"
"""First byte of a lease file that was given up. It replaces the `{` of its JSON by one write."""


@dataclass(frozen=True)
class LeaseTimes:
    """How a lease is kept over hosts.

    Attributes:
        renew_s: time between two renewals.
        lease_s: a lease of another host that was not renewed for this long, as its watcher measures it, is over.
    """

    renew_s: float = 10.0
    lease_s: float = 60.0


DEFAULT_TIMES = LeaseTimes()


class LeaseFile:
    """A lease file of this process, renewed by a thread until it is released or removed."""

    def __init__(self, path: Path, handle: int, renew_s: float) -> None:
        self._path = path
        self._handle = handle
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._keep, args=(renew_s,), name=f"lease {path.name}", daemon=True).start()

    @classmethod
    def create(cls, path: Path, times: LeaseTimes = DEFAULT_TIMES) -> LeaseFile | None:
        """Create the file for this process and begin to renew it; None if it exists. Of many callers, one succeeds.

        Raises:
            OSError: the folder is missing, not writable or full.
        """
        owner = {**asdict(ProcessPlace.own()), "since": time.time()}
        handle = _create_exclusively(path, json.dumps(owner).encode())
        return None if handle is None else cls(path, handle, times.renew_s)

    def renew(self) -> None:
        """Set the file's times; without effect once it is released. Raises OSError if the file cannot be reached."""
        with self._lock:
            if self._handle >= 0:
                os.utime(self._handle)

    def release(self) -> None:
        """Mark the file as given up; without effect the second time, and where another process has removed it."""
        with self._lock:
            if self._handle < 0:
                return
            self._ended.set()
            with suppress(OSError):
                os.pwrite(self._handle, _RELEASED, 0)
            with suppress(OSError):
                os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Give up the file, and remove it: for a path that no other process creates."""
        self.release()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _keep(self, renew_s: float) -> None:
        while not self._ended.wait(renew_s):
            with suppress(OSError):  # it is tried again; until then others may take the lease to be over
                self.renew()


def _create_exclusively(path: Path, content: bytes) -> int | None:
    """Create a file with its content in one step; return its handle, None if it exists."""
    staging = path.with_name(f"{STAGING}{uuid4().hex}")
    handle = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(handle, content)
        if _link(staging, path, handle):
            made, handle = handle, -1
            return made
        return None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_then_write(path, content)
    finally:
        if handle >= 0:
            os.close(handle)
        staging.unlink(missing_ok=True)


def _link(staging: Path, path: Path, handle: int) -> bool:
    """Give a file its name unless that exists. Where a network lost the answer, the number of links tells."""
    try:
        os.link(staging, path)
        return True
    except FileExistsError:
        return os.fstat(handle).st_nlink == 2
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise
        return False  # this process stood still for so long that another one has swept its file


def _create_then_write(path: Path, content: bytes) -> int | None:
    """Do the same where there are no hard links; a process that is killed in between leaves a file that names nobody."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    os.write(handle, content)
    return handle


def sweep_staging(folder: Path, now: float, age_s: float) -> None:
    """Remove files that processes killed in `LeaseFile.create` left in a folder.

    Args:
        now: the file server's time, of a file that it has just written.
    """
    for name in os.listdir(folder):
        path = folder / name
        with suppress(OSError):
            if name.startswith(STAGING) and now - path.stat().st_mtime > age_s:
                path.unlink()


class LeaseState(Enum):
    """What a lease file says to a process that does not hold it."""

    HELD = "held"
    """Its process lives on this machine."""
    WATCHED = "watched"
    """Its process is elsewhere, and may live."""
    RELEASED = "released"
    ENDED = "ended"
    """Its process is gone."""
    EXPIRED = "expired"
    """It was not renewed; its process may still exist."""
    MISSING = "missing"

    @property
    def is_free(self) -> bool:
        return self not in (LeaseState.HELD, LeaseState.WATCHED)


@dataclass
class _Watched:
    """Since when a file has not changed, in watched seconds."""

    version: tuple[int, int, int]
    looked_at: float
    unchanged_s: float = 0.0


class LeaseWatch:
    """One process's view of the lease files of others; remembers what it saw of those of other hosts.

    Args:
        clock: seconds that never jump.
    """

    def __init__(self, times: LeaseTimes = DEFAULT_TIMES, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = times.lease_s
        self._clock = clock
        self._watched: dict[Path, _Watched] = {}
        self._here = ProcessPlace.own().place

    def look(self, path: Path) -> LeaseState:
        """Return the state of a lease file now. Raises OSError if it cannot be read."""
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                stat, content = os.fstat(handle), os.read(handle, _MAX_BYTES)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._watched.pop(path, None)
            return LeaseState.MISSING
        if content.startswith(_RELEASED):
            self._watched.pop(path, None)
            return LeaseState.RELEASED
        owner = _parse_owner(content)
        dead = None if owner is None else owner.process.is_dead(self._here)
        if dead is not None:
            return LeaseState.ENDED if dead else LeaseState.HELD
        return self._judge_by_time(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))

    def _judge_by_time(self, path: Path, version: tuple[int, int, int]) -> LeaseState:
        now, before = self._clock(), self._watched.get(path)
        if before is None or before.version != version:
            self._watched[path] = _Watched(version, now)
            return LeaseState.WATCHED
        before.unchanged_s += min(now - before.looked_at, LONGEST_GAP_S)
        before.looked_at = now
        return LeaseState.EXPIRED if before.unchanged_s >= self._lease_s else LeaseState.WATCHED


def read_owner(path: Path) -> str | None:
    """Return which process holds, or last held, a lease file, and since when; None if the file does not say."""
    try:
        content = path.read_bytes()[:_MAX_BYTES]
    except OSError:
        return None
    owner = _parse_owner(content)
    return None if owner is None else str(owner)


@dataclass(frozen=True)
class _Owner:
    """The process that a lease file names, and since when it holds it by that process's clock."""

    process: ProcessPlace
    since: float

    def __str__(self) -> str:
        return f"{self.process} since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _parse_owner(content: bytes) -> _Owner | None:
    if content.startswith(_RELEASED):
        content = b"{" + content[1:]
    try:
        fields = json.loads(content)
        process = ProcessPlace(int(fields["pid"]), float(fields["started"]), Place(**fields["place"]))
        return _Owner(process, float(fields["since"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
