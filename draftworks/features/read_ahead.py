"""Samples that are read before they are asked for, by threads, within a bound of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from draftworks.features.contracts import SampleRef

if TYPE_CHECKING:
    from torch import Tensor

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
