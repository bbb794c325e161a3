"""Reading of micro-batches: samples are fetched, decoded, copied if the store requires it, collated; ahead, by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.schedule import MicroBatch
from draftworks.features.tensor_bytes import decode_features

Sample = dict[str, Tensor]
Collate = Callable[[Sequence[Mapping[str, Tensor]], Sequence[str]], TrainBatch]


class SampleReader:
    """Reads micro-batches from a store; safe to use from several threads if the store is.

    A padding batch is a real batch of one sample with its loss mask cleared and no `sample_ids`: it goes through the
    model like any other, so that collectives match, and adds nothing.
    """

    def __init__(self, store: FeatureStore, collate: Collate) -> None:
        self._store = store
        self._collate = collate

    def stop_waiting(self) -> None:
        """Make reads end that wait for features, see `FeatureStore.stop_waiting`."""
        self._store.stop_waiting()

    def announce(self, refs: Sequence[SampleRef], plan: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of `plan`; the store is told of the samples of each some batches before."""
        if not self._store.lookahead:
            yield from plan
            return
        ahead: deque[MicroBatch] = deque()
        for batch in plan:
            self._store.expect([refs[index] for index in batch.indices])
            ahead.append(batch)
            if len(ahead) > self._store.lookahead:
                yield ahead.popleft()
        yield from ahead

    def forget_announced(self) -> None:
        """Tell the store that what was announced and not read will not be."""
        self._store.forget_expected()

    def read(self, refs: Sequence[SampleRef], batch: MicroBatch) -> TrainBatch:
        """Read and collate the samples of `refs` that a micro-batch names.

        Raises:
            DraftworksError: a store's error, with the sample named.
            RuntimeError: any other failure of a sample or of collation, with the samples named.
        """
        chosen = [refs[index] for index in batch.indices]
        samples = [self._sample(ref, batch.padding) for ref in chosen]
        ids = tuple(ref.sample_id for ref in chosen)
        try:
            collated = self._collate(samples, ids)
        except Exception as error:
            raise _name_sample(error, f"batch of samples {', '.join(ids)}") from error
        tokens = 0 if batch.padding else sum(ref.num_tokens for ref in chosen)
        return replace(collated, sample_ids=() if batch.padding else ids, num_tokens=tokens, ends_step=batch.ends_step)

    def _sample(self, ref: SampleRef, padding: bool) -> Sample:
        try:
            tensors, handle = self._store.get(ref)
            try:
                decoded = decode_features(tensors, "features")
                if self._store.lease_bound:  # what was decoded is a copy
                    decoded = {k: v.clone() if v is tensors[k] else v for k, v in decoded.items()}
                tensors = decoded
            finally:
                self._store.release(handle)
            if padding and "loss_mask" in tensors:
                tensors = {**tensors, "loss_mask": torch.zeros_like(tensors["loss_mask"])}
            return tensors
        except Exception as error:
            raise _name_sample(error, f"sample {ref.sample_id}") from error


def _name_sample(error: Exception, what: str) -> Exception:
    """Return the error with its sample named; a user's error keeps its type."""
    if isinstance(error, DraftworksError):
        return error if what in str(error) else type(error)(f"{what}: {error}")
    return RuntimeError(f"{what}: {type(error).__name__}: {error}")


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
