"""An exclusive lease with a fencing number, safe on a network file system. Torch-free.

    {lock}/          a folder; one of an earlier version is a file, which is replaced
    {lock}/{number}  the lease file of the newest holder; lower numbers are removed by it

A process takes the lease by creating the next number, which is exclusive; it may do so when the newest number was released or
is of a dead process. The newest number is never removed, so numbers only grow. A holder that another process took to be dead
finds a higher number than its own, and must publish nothing: `Lease.confirm`.
"""

from __future__ import annotations

import errno
import fcntl
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

from draftworks.errors import StoreError
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
    """State of a lease as seen by a process that does not hold it."""

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
    """One process's view of other processes' lease files: for how long each file of another host has not changed.

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


UNKNOWN_OWNER = "an unknown process"
PAUSE_OF_EXPIRED = 0.05
"""Share of the lease time that is waited after taking an expired lease: its holder may be publishing this moment."""


class LeaseLostError(StoreError):
    """Another process took the lease, since this one was not heard of for too long."""


class Lease:
    """A lease that this process holds.

    Attributes:
        number: its fencing number, higher than that of every earlier holder.
        waited: whether another process held it when this one first tried.
    """

    def __init__(self, folder: Path, number: int, file: LeaseFile) -> None:
        self.number = number
        self.waited = False
        self._folder = folder
        self._file = file

    def confirm(self) -> None:
        """Return if this process still holds the lease; to be called right before something is published.

        Raises:
            LeaseLostError: another process has taken it.
        """
        with suppress(OSError):
            self._file.renew()
        if not self.is_held:
            newest = _find_newest(self._folder)
            taker = (read_owner(self._folder / str(newest)) if newest else None) or UNKNOWN_OWNER
            raise LeaseLostError(
                f"{self._folder}: this process lost the lock to {taker}, which did not hear of it for too long (was this "
                "process or its file system suspended?). What it made is not published. Run it again: what the other "
                "process publishes is used"
            )

    @property
    def is_held(self) -> bool:
        """Whether nobody has taken the lease from this process."""
        return _find_newest(self._folder) == self.number

    def release(self) -> None:
        """Give the lease up; without effect the second time."""
        self._file.release()


class LeasePath:
    """The folder of a lease, with this process's watch of its holders.

    Args:
        folder: the lease's folder; its parent exists.
    """

    def __init__(self, folder: Path, times: LeaseTimes = DEFAULT_TIMES) -> None:
        self._folder = folder
        self._times = times
        self._watch = LeaseWatch(times)

    def try_acquire(self) -> Lease | None:
        """Take the lease if no living process holds it.

        A lease of another host is only known to be over after `LeaseTimes.lease_s` of calls at least every few seconds.

        Raises:
            OSError: the folder cannot be made, read or written.
        """
        if not _make_folder(self._folder):
            return None
        newest = _find_newest(self._folder)
        state = LeaseState.RELEASED if newest == 0 else self._watch.look(self._folder / str(newest))
        if not state.is_free or state is LeaseState.MISSING:
            return None  # missing: a higher number was created a moment ago
        number = newest + 1
        file = LeaseFile.create(self._folder / str(number), self._times)
        if file is None:
            return None
        if _find_newest(self._folder) != number:
            file.remove()  # higher numbers were there, and this one had been removed, before it was created again
            return None
        for older in _list_numbers(self._folder):
            if older < number:
                with suppress(FileNotFoundError):
                    (self._folder / str(older)).unlink()
        if state in (LeaseState.ENDED, LeaseState.EXPIRED):
            sweep_staging(self._folder, (self._folder / str(number)).stat().st_mtime, self._times.lease_s)
        if state is LeaseState.EXPIRED:
            time.sleep(self._times.lease_s * PAUSE_OF_EXPIRED)
        return Lease(self._folder, number, file)

    def find_holder(self) -> str | None:
        """Return which process holds, or last held, the lease, and since when; None if no file says it."""
        return read_owner(self._folder / str(_find_newest(self._folder)))

    def describe_holder(self) -> str:
        """Return what `find_holder` returns, or words for an unknown process."""
        return self.find_holder() or UNKNOWN_OWNER

    def look(self) -> LeaseState:
        """Return the state of the newest lease; RELEASED if there never was one."""
        newest = _find_newest(self._folder)
        return self._watch.look(self._folder / str(newest)) if newest else LeaseState.RELEASED


def _list_numbers(folder: Path) -> list[int]:
    """Return the numbers of lease files in a folder, in one look at it; none if there is no folder."""
    try:
        names = os.listdir(folder)  # opens the folder: a network file system then asks its server
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(name) for name in names if name.isdecimal()]


def _find_newest(folder: Path) -> int:
    return max(_list_numbers(folder), default=0)


def _make_folder(folder: Path) -> bool:
    """Make the lease's folder, in place of an earlier version's lock file; False if a process holds that."""
    if folder.is_dir():
        return True
    try:
        folder.mkdir()
        return True
    except FileExistsError:
        pass
    with suppress(FileNotFoundError, IsADirectoryError), folder.open("r+b") as old:
        try:
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            folder.unlink()
    folder.mkdir(exist_ok=True)
    return True
