"""Journals of the keys that were freed from immutable shards.

    shards/{digest}.freed   a line for each freed key of the shard {digest}.safetensors, appended; absent for most
    freed.lock              held while a shard whose keys are all freed is removed, or published again

A journal is not synced: after a power cut, freed keys may be there again, which is sound, since keys are content. A line
that a killed process did not finish is no key of the shard and is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.lease import DEFAULT_TIMES, LeasePath

LOCK_TIMEOUT_S = 2 * DEFAULT_TIMES.lease_s
LOCK_POLL_S = 0.005


@dataclass(frozen=True)
class JournalState:
    """What changes whenever a journal does."""

    inode: int
    size: int
    changed_ns: int


class FreedKeys:
    """The journals of one folder of shards, which any number of processes append to."""

    def __init__(self, shards: Path) -> None:
        self._shards = shards
        self._lock = shards.parent / "freed.lock"

    def states(self) -> dict[Path, JournalState]:
        """Return the state of every journal, by the path of its shard."""
        found = {}
        for journal in self._shards.glob("*.freed"):
            with suppress(FileNotFoundError):
                stat = journal.stat()
                found[_shard_of(journal)] = JournalState(stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return found

    def read(self, shard: Path) -> frozenset[str]:
        """Return the freed keys of a shard; none if its journal cannot be read."""
        try:
            return frozenset(_journal_of(shard).read_text(errors="replace").split("\n")) - {""}
        except OSError:
            return frozenset()

    def record(self, shard: Path, keys: Iterable[str]) -> None:
        """Append keys to a shard's journal. Raises StoreError if the disk refuses."""
        # The first newline ends a line that a killed process has left unfinished.
        lines = "".join(f"\n{key}" for key in keys) + "\n"
        try:
            with _journal_of(shard).open("a") as stream:
                stream.write(lines)
        except OSError as error:
            raise StoreError(f"features cannot be freed, {_journal_of(shard)} cannot be written: {error}") from error

    def remove_shard(self, shard: Path, keys: Collection[str]) -> int | None:
        """Remove a shard and its journal if the journal has all `keys`; return the bytes, None if it has not."""
        with self._hold_lock():
            if not self.read(shard).issuperset(keys):
                return None  # another process has published the shard again
            size = 0
            with suppress(FileNotFoundError):
                size = shard.stat().st_size
                shard.unlink()
            _journal_of(shard).unlink(missing_ok=True)
            return size

    def sweep(self) -> None:
        """Remove the journals whose shards are gone: their removal was interrupted."""
        for shard in self.states():
            if not shard.exists():
                with self._hold_lock():
                    if not shard.exists():
                        _journal_of(shard).unlink(missing_ok=True)

    @contextmanager
    def publishing(self, shard: Path) -> Iterator[None]:
        """Context in which a shard is renamed into place: its keys are stored again, whatever was freed before."""
        if not _journal_of(shard).exists():
            yield
            return
        with self._hold_lock():
            yield
            _journal_of(shard).unlink(missing_ok=True)

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        path, deadline = LeasePath(self._lock), time.monotonic() + LOCK_TIMEOUT_S
        while (lease := path.try_acquire()) is None:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self._lock} was held by another process for {LOCK_TIMEOUT_S:g} s: end {path.describe_holder()}"
                )
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            lease.release()


def _journal_of(shard: Path) -> Path:
    return shard.with_suffix(".freed")


def _shard_of(journal: Path) -> Path:
    return journal.with_suffix(".safetensors")
