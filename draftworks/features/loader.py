"""Data loader from sample references to training batches: fetch, copy if the store requires it, release, collate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draftworks.errors import DraftworksError
from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.packed_schedule import PackedEvaluationSchedule, PackedTrainSchedule
from draftworks.features.packing import PackLimits, require_lengths
from draftworks.features.schedule import BatchSchedule, EvaluationSchedule, MicroBatch, PaddedTrainSchedule

Sample = dict[str, Tensor]
Collate = Callable[[Sequence[Mapping[str, Tensor]], Sequence[str]], TrainBatch]


class FeatureDataLoader:
    """Iterates over one rank's micro-batches of one epoch.

    A padding batch (evaluation on ranks that have run out) is a real batch of one sample with its loss mask cleared and
    no `sample_ids`: it goes through the model like any other, so that collectives match, and adds nothing.

    Args:
        refs: all samples, the same on every rank.
        store: returns a sample's tensors; with `JoinedStore`, also `input_ids` and `loss_mask`.
        schedule: the samples of each micro-batch; see `for_training` and `for_evaluation`.
        collate: samples and their ids to a batch, as `DraftStrategy.collate`.
        prefetch: batches prepared ahead, by `threads` threads; 0 prepares them in the caller's thread.
    """

    def __init__(
        self,
        refs: Sequence[SampleRef],
        store: FeatureStore,
        schedule: BatchSchedule,
        collate: Collate,
        prefetch: int = 2,
        threads: int = 1,
    ) -> None:
        self.schedule = schedule
        self._refs = refs
        self._store = store
        self._collate = collate
        self._prefetch = prefetch
        self._threads = threads
        self._device = torch.device("cpu")
        self._epoch = 0
        self._skip = 0

    @classmethod
    def for_training(
        cls,
        refs: Sequence[SampleRef],
        store: FeatureStore,
        batch_size: int,
        collate: Collate,
        *,
        global_batch_size: int | None = None,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        prefetch: int = 2,
    ) -> FeatureDataLoader:
        """Loader of shuffled epochs; `global_batch_size` defaults to one micro-batch of `batch_size` on each rank."""
        schedule = PaddedTrainSchedule(
            samples=len(refs),
            micro_batch_size=batch_size,
            global_batch_size=global_batch_size or batch_size * world,
            rank=rank,
            world=world,
            seed=seed,
        )
        return cls(refs, store, schedule, collate, prefetch)

    @classmethod
    def for_packed_training(
        cls,
        refs: Sequence[SampleRef],
        store: FeatureStore,
        limits: PackLimits,
        pack: Collate,
        *,
        global_batch_size: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        prefetch: int = 2,
    ) -> FeatureDataLoader:
        """Loader with the same samples in every step as `for_training`, in packed rows; `pack` as `DraftStrategy.pack`.

        Raises:
            DataError: a sample does not fit into a row, see `require_lengths`.
        """
        schedule = PackedTrainSchedule(
            samples=len(refs),
            lengths=require_lengths(refs, limits),
            pack_tokens=limits.tokens,
            global_batch_size=global_batch_size,
            rank=rank,
            world=world,
            seed=seed,
        )
        return cls(refs, store, schedule, pack, prefetch)

    @classmethod
    def for_evaluation(
        cls,
        refs: Sequence[SampleRef],
        store: FeatureStore,
        batch_size: int,
        collate: Collate,
        *,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
    ) -> FeatureDataLoader:
        """Loader of every sample exactly once, in order."""
        return cls(refs, store, EvaluationSchedule(len(refs), batch_size, rank, world), collate, prefetch)

    @classmethod
    def for_packed_evaluation(
        cls,
        refs: Sequence[SampleRef],
        store: FeatureStore,
        limits: PackLimits,
        pack: Collate,
        *,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
    ) -> FeatureDataLoader:
        """Loader of every sample exactly once, in packed rows.

        Raises:
            DataError: a sample does not fit into a row, see `require_lengths`.
        """
        lengths = require_lengths(refs, limits)
        schedule = PackedEvaluationSchedule(lengths=lengths, pack_tokens=limits.tokens, rank=rank, world=world)
        return cls(refs, store, schedule, pack, prefetch)

    def prepare_for(self, device: torch.device) -> None:
        """Name the device that batches will go to; for a GPU, prefetched batches are pinned. They stay on the CPU."""
        self._device = device

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self._epoch = epoch

    def seek(self, steps: int) -> None:
        """Start the next iteration (that one only) after `steps` optimizer steps; skipped features are not read.

        Counted in steps because the number of packed rows in a step varies.

        Raises:
            ValueError: negative, or beyond the end of the epoch.
        """
        if not 0 <= steps <= self.schedule.steps:
            raise ValueError(f"cannot seek to step {steps}: an epoch has {self.schedule.steps} steps")
        self._skip = steps

    def __iter__(self) -> Iterator[TrainBatch]:
        plan = self.schedule.batches(self._epoch, self._skip)
        self._skip = 0
        return map(self.load, plan) if self._prefetch == 0 else self._prefetched(plan)

    def load(self, batch: MicroBatch) -> TrainBatch:
        """Read and collate one micro-batch.

        Raises:
            DraftworksError: a store's error, with the sample named.
            RuntimeError: any other failure of a sample or of collation, with the samples named.
        """
        refs = [self._refs[index] for index in batch.indices]
        samples = [self._sample(ref, batch.padding) for ref in refs]
        ids = tuple(ref.sample_id for ref in refs)
        try:
            collated = self._collate(samples, ids)
        except Exception as error:
            raise _name_sample(error, f"batch of samples {', '.join(ids)}") from error
        tokens = 0 if batch.padding else sum(ref.num_tokens for ref in refs)
        return replace(collated, sample_ids=() if batch.padding else ids, num_tokens=tokens, ends_step=batch.ends_step)

    def _load_pinned(self, batch: MicroBatch) -> TrainBatch:
        return self.load(batch).pin_memory()

    def _sample(self, ref: SampleRef, padding: bool) -> Sample:
        try:
            tensors, handle = self._store.get(ref)
            try:
                if self._store.lease_bound:
                    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            finally:
                self._store.release(handle)
            if padding and "loss_mask" in tensors:
                tensors = {**tensors, "loss_mask": torch.zeros_like(tensors["loss_mask"])}
            return tensors
        except Exception as error:
            raise _name_sample(error, f"sample {ref.sample_id}") from error

    def _prefetched(self, plan: Iterable[MicroBatch]) -> Iterator[TrainBatch]:
        load, begin = self.load, None
        if self._device.type == "cuda":
            load = self._load_pinned
            # A new thread is bound to the first GPU, not to its process's: all ranks would take memory there.
            bound = torch.cuda.current_device() if self._device.index is None else self._device.index
            begin = partial(torch.cuda.set_device, bound)
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="feature-loader", initializer=begin)
        waiting: deque[Future[TrainBatch]] = deque()
        try:
            for batch in plan:
                waiting.append(pool.submit(load, batch))
                if len(waiting) > self._prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _name_sample(error: Exception, what: str) -> Exception:
    """Return the error with its sample named; a user's error keeps its type."""
    if isinstance(error, DraftworksError):
        return error if what in str(error) else type(error)(f"{what}: {error}")
    return RuntimeError(f"{what}: {type(error).__name__}: {error}")
