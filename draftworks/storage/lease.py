"""An exclusive lease with a fencing number, safe on a network file system. Torch-free.

    {lock}/          a folder; one of an earlier version is a file, which is replaced
    {lock}/{number}  the lease file of the newest holder; lower numbers are removed by it

A process takes the lease by creating the next number, which is exclusive; it may do so when the newest number was released or
is of a dead process. The newest number is never removed, so numbers only grow. A holder that another process took to be dead
finds a higher number than its own, and must publish nothing: `Lease.confirm`.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.lease_file import (
    DEFAULT_TIMES,
    LeaseFile,
    LeaseState,
    LeaseTimes,
    LeaseWatch,
    read_owner,
    sweep_staging,
)

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
    """The place of a lease, and what this process has seen of its holders.

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
