"""A folder of features that were read from elsewhere, of bounded size, shared by the processes of a machine.

    folder/ab/{digest}     features of a sample that were read together, named by their keys and checksums
    folder/used            bytes of all files, written or about to be; locked while it changes and while files are evicted

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
from threading import get_ident

from draftworks.features.sample_bytes import SampleBytes

KEEP_SHARE = 0.9
"""Share of the limit that an eviction leaves."""
TOUCH_AFTER_S = 60.0
"""Age at which a read makes a file young again."""
log = logging.getLogger(__name__)


class FeatureCache:
    """Features by content below `folder`; the ones that were not read for longest are evicted. Thread-safe.

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

    def has(self, wanted: SampleBytes) -> bool:
        """Whether features are probably here."""
        return self._works and self._locate(wanted.name).exists()

    def read(self, wanted: SampleBytes) -> bytearray | None:
        """Return the bytes of features that were kept together; None if they are not here."""
        if not self._works:
            return None
        name = wanted.name
        content = self._read(self._locate(name), wanted.nbytes)
        if content is not None and name not in self._checked:
            if wanted.find_altered(content) is None:
                self._checked.add(name)
            else:
                log.warning("%s is damaged: it is removed and read again", self._locate(name))
                self._locate(name).unlink(missing_ok=True)
                content = None
        if content is None:
            self.misses += 1
        else:
            self.hits += 1
        return content

    def keep(self, wanted: SampleBytes, content: bytearray) -> None:
        """Keep the bytes of features, which are known to be right. What does not fit, or fails, is not kept."""
        if not self._works or wanted.nbytes > self._limit // 4:
            return
        name = wanted.name
        path = self._locate(name)
        staging = path.with_name(f"{name}.{os.getpid()}.{get_ident()}.tmp")
        try:
            handle = self._reserve(staging, wanted.nbytes)
            try:
                _write(handle, content)
                os.replace(staging, path)
            except BaseException:
                staging.unlink(missing_ok=True)
                raise
            finally:
                os.close(handle)
        except OSError as error:
            if self._works:
                log.warning("features are not kept in %s any more: %s", self._folder, error)
            self._works = False
            return
        self._checked.add(name)

    def count(self) -> dict[str, int]:
        """Return figures for people."""
        try:
            used = int((self._folder / "used").read_text())
        except (OSError, ValueError):
            used = 0
        return {"cache_bytes": used, "cache_hits": self.hits, "cache_misses": self.misses}

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

    def _reserve(self, staging: Path, nbytes: int) -> int:
        """Return a new file of this size, opened to be written; others are evicted first if there is no room."""
        with self._locked() as used_file:
            used = _read_number(used_file)
            if used is None or used + nbytes > self._limit:
                used = self._evict(nbytes)
            os.pwrite(used_file, f"{used + nbytes:020d}".encode(), 0)
            try:
                handle = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:
                staging.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.truncate(handle, nbytes)
            return handle

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

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock in the block; yields the file `used`, which is the lock too."""
        handle = os.open(self._folder / "used", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)


def _read_number(handle: int) -> int | None:
    try:
        return int(os.pread(handle, 20, 0))
    except ValueError:
        return None


def _write(handle: int, content: bytearray) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _list_files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield when each kept file was last read, its size and its path."""
    for below in os.scandir(folder):
        if not below.is_dir():
            continue
        for file in os.scandir(below.path):
            with suppress(FileNotFoundError):
                stat = file.stat()
                yield stat.st_mtime, stat.st_size, file.path
