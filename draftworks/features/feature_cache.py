"""What was read of a store far away: ahead, in memory, by threads; and kept in a folder of bounded size that processes share.

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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_ident
from typing import TYPE_CHECKING

from draftworks.features.contracts import SampleRef
from draftworks.features.object_shard import SampleBytes

if TYPE_CHECKING:
    from torch import Tensor


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


Features = Mapping[str, "Tensor"]
"""Tensors by feature key."""
SampleKey = tuple[str, ...]


@dataclass(frozen=True)
class _Begun:
    features: Future[Features]
    nbytes: int


class ReadAhead:
    """Reads the samples that were announced, in their order, while their bytes stay within `limit_bytes`. Thread-safe.

    Args:
        read: fetches a sample's features that are worth fetching ahead.
        measure: bytes that `read` will fetch; 0: the sample is not read ahead.
        threads: samples that are read at a time.
    """

    def __init__(
        self,
        read: Callable[[SampleRef], Features],
        measure: Callable[[SampleRef], int],
        limit_bytes: int,
        threads: int,
    ) -> None:
        self._read = read
        self._measure = measure
        self._limit = limit_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
        self._lock = Lock()
        self._waiting: deque[SampleRef] = deque()
        self._begun: dict[SampleKey, _Begun] = {}
        self._held = 0

    def expect(self, refs: Sequence[SampleRef]) -> None:
        """Announce samples that will be taken soon, after those announced before."""
        with self._lock:
            self._waiting.extend(refs)
            self._begin()

    def take(self, ref: SampleRef) -> Features:
        """Return what was read ahead of a sample; waits while it is being read; nothing if it was not begun.

        Raises what its reading raised.
        """
        key = _identify(ref)
        with self._lock:
            begun = self._begun.pop(key, None)
            if begun is None and self._waiting and _identify(self._waiting[0]) == key:
                self._waiting.popleft()
        if begun is None:
            return {}
        try:
            return begun.features.result()
        finally:
            self._finish(begun)

    def forget(self) -> None:
        """Drop what was announced and not taken: its reader has stopped."""
        with self._lock:
            self._waiting.clear()
            for begun in self._begun.values():
                if begun.features.cancel() or begun.features.done():
                    self._held -= begun.nbytes
                else:
                    begun.features.add_done_callback(lambda _, begun=begun: self._finish(begun))
            self._begun.clear()

    def close(self) -> None:
        """End the threads, after what they are reading."""
        self.forget()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self, begun: _Begun) -> None:
        with self._lock:
            self._held -= begun.nbytes
            self._begin()

    def _begin(self) -> None:
        """Begin to read what is announced, while there is room; the lock is held."""
        while self._waiting:
            ref = self._waiting[0]
            key, nbytes = _identify(ref), self._measure(ref)
            if key not in self._begun and nbytes:
                if self._held and self._held + nbytes > self._limit:
                    return
                self._held += nbytes
                self._begun[key] = _Begun(self._pool.submit(self._read, ref), nbytes)
            self._waiting.popleft()


def _identify(ref: SampleRef) -> SampleKey:
    return tuple(ref.feature_keys.values())
