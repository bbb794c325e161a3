"""Batches that are read ahead by threads, in the order in which they were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

import torch

from draftworks.features.contracts import TrainBatch

Read = Callable[[], TrainBatch]


class BatchPrefetcher:
    """A queue of batches that are being read. A context manager: leaving the block ends its threads.

    Args:
        threads: read ahead; 0 reads each batch in the caller's thread when it is taken.
        device: where batches will go to; for a GPU they are pinned. They stay on the CPU.
        stop_waiting: called when the block is left, so that no thread goes on waiting for features.
    """

    def __init__(
        self,
        threads: int,
        device: torch.device,
        stop_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._stop_waiting = stop_waiting
        self._pins = threads > 0 and device.type == "cuda"
        self._waiting: deque[Read] = deque()
        self._pool = None
        if threads > 0:
            begin = None
            if self._pins:
                # A new thread is bound to the first GPU, not to its process's: all ranks would take memory there.
                bound = torch.cuda.current_device() if device.index is None else device.index
                begin = partial(torch.cuda.set_device, bound)
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="feature-loader", initializer=begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._stop_waiting()
            self._pool.shutdown(wait=True)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, read: Read) -> None:
        """Ask for a batch."""
        if self._pool is None:
            self._waiting.append(read)
        else:
            future: Future[TrainBatch] = self._pool.submit(self._read_pinned if self._pins else _call, read)
            self._waiting.append(future.result)

    def take(self) -> TrainBatch:
        """Return the oldest batch that was asked for; raises what its reading raised."""
        return self._waiting.popleft()()

    def _read_pinned(self, read: Read) -> TrainBatch:
        return read().pin_memory()


def _call(read: Read) -> TrainBatch:
    return read()
