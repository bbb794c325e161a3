"""A folder of features that were read from elsewhere, of bounded size, shared by the processes of a machine.

    folder/ab/{key}-{checksum}     the bytes of one feature, named by what they are
    folder/used                    bytes of all of them, written or about to be
    folder/lock                    held while `used` changes and while files are evicted

A file is compared with its checksum when a process first reads it; one that is damaged is removed and read from its
store again. So nothing is lost with the folder, and a process killed at any moment leaves nothing that is believed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftworks.features.object_shard import PlacedEntry

KEEP_SHARE = 0.9
"""Share of the limit that an eviction leaves."""
TOUCH_AFTER_S = 60.0
"""Age at which a read makes a file young again."""
log = logging.getLogger(__name__)


class FeatureCache:
    """Features by key and checksum below `folder`; the ones that were not read for longest are evicted. Thread-safe.

    Args:
        limit_bytes: all processes together keep no more than this.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._checked: set[str] = set()
        self._works = limit_bytes > 0
        self.hits = 0
        self.misses = 0

    def has(self, key: str, entry: PlacedEntry) -> bool:
        """Whether a feature is probably here."""
        return self._works and self._locate(_name(key, entry)).exists()

    def read(self, key: str, entry: PlacedEntry) -> bytearray | None:
        """Return a feature's bytes; None if they are not here."""
        if not self._works:
            return None
        name = _name(key, entry)
        content = self._read(self._locate(name), entry.nbytes)
        if content is not None and name not in self._checked:
            if not entry.matches(content):
                log.warning("%s is damaged: it is removed and read again", self._locate(name))
                self._locate(name).unlink(missing_ok=True)
                content = None
            else:
                self._checked.add(name)
        if content is None:
            self.misses += 1
        else:
            self.hits += 1
        return content

    def keep(self, key: str, entry: PlacedEntry, content: Any) -> None:
        """Keep a feature's bytes, which are known to be right. What does not fit, or fails, is not kept."""
        if not self._works or entry.nbytes > self._limit // 4:
            return
        name = _name(key, entry)
        path = self._locate(name)
        if path.exists():
            return
        staging = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._reserve(staging, entry.nbytes)
            try:
                with staging.open("r+b", buffering=0) as stream:
                    stream.write(content)
                os.replace(staging, path)
            finally:
                staging.unlink(missing_ok=True)
        except OSError as error:
            if self._works:
                log.warning("features are not kept in %s any more: %s", self._folder, error)
            self._works = False
            return
        self._checked.add(name)

    def count(self) -> dict[str, int]:
        """Return figures for people."""
        return {"cache_bytes": self._read_used() or 0, "cache_hits": self.hits, "cache_misses": self.misses}

    def _locate(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _read(self, path: Path, nbytes: int) -> bytearray | None:
        try:
            with path.open("rb", buffering=0) as stream:
                stat = os.fstat(stream.fileno())
                if stat.st_size != nbytes:
                    return None
                content = bytearray(nbytes)
                view, done = memoryview(content), 0
                while done < nbytes and (count := stream.readinto(view[done:])):
                    done += count
        except OSError:
            return None
        if time.time() - stat.st_mtime > TOUCH_AFTER_S:
            with suppress(OSError):
                os.utime(path)
        return content if done == nbytes else None

    def _reserve(self, staging: Path, nbytes: int) -> None:
        """Make a file of this size; evict others first if there is no room."""
        with self._locked():
            used = self._read_used()
            if used is None or used + nbytes > self._limit:
                used = self._evict(nbytes)
            self._write_used(used + nbytes)
            with staging.open("wb") as stream:
                stream.truncate(nbytes)

    def _evict(self, nbytes: int) -> int:
        """Remove the oldest files if there is no room for `nbytes`; return the bytes that are left."""
        files = sorted(_list_files(self._folder))
        used = sum(size for _, size, _ in files)
        if used + nbytes <= self._limit:
            return used
        for _, size, path in files:
            if used + nbytes <= self._limit * KEEP_SHARE:
                break
            with suppress(OSError):
                os.unlink(path)
            used -= size
        return used

    def _read_used(self) -> int | None:
        try:
            return int((self._folder / "used").read_text())
        except (OSError, ValueError):
            return None

    def _write_used(self, used: int) -> None:
        (self._folder / "used").write_text(str(used))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / "lock").open("wb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _name(key: str, entry: PlacedEntry) -> str:
    return f"{key}-{entry.checksum}"


def _list_files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield when each kept file was last read, its size and its path."""
    for below in os.scandir(folder):
        if not below.is_dir():
            continue
        for file in os.scandir(below.path):
            with suppress(FileNotFoundError):
                stat = file.stat()
                yield stat.st_mtime, stat.st_size, file.path
