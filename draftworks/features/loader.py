"""Data loader of planned sets: from sample references and a schedule to training batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.packed_schedule import PackedEvaluationSchedule, PackedTrainSchedule
from draftworks.features.packing import PackLimits, require_lengths
from draftworks.features.prefetch import BatchPrefetcher
from draftworks.features.sample_reader import Collate, SampleReader
from draftworks.features.schedule import (
    BatchSchedule,
    EvaluationSchedule,
    MicroBatch,
    PaddedTrainSchedule,
    TrainSchedule,
)
from draftworks.features.training_loader import SampleOrder


class FeatureDataLoader:
    """Iterates over one rank's micro-batches of one epoch of a set whose order is planned.

    Ranks that have run out get padding batches, see `SampleReader`. For references in arrival order see
    `QueueDataLoader`.

    Args:
        refs: all samples, the same on every rank.
        store: returns a sample's tensors; with `JoinedStore`, also `input_ids` and `loss_mask`.
        schedule: the samples of each micro-batch; see `for_training` and `for_evaluation`.
        collate: samples and their ids to a batch, as `DraftStrategy.collate`.
        prefetch: batches prepared ahead, by `threads` threads; 0 prepares them in the caller's thread.
    """

    has_ended = False
    """Another epoch can always follow."""
    stopped_by = 0

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
        self._reader = SampleReader(store, collate)
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
        left_out: Sequence[int] = (),
        prefetch: int = 2,
    ) -> FeatureDataLoader:
        """Loader of shuffled epochs; `global_batch_size` defaults to one micro-batch of `batch_size` on each rank.

        Args:
            left_out: samples of the population that `refs` lack, as `find_left_out` returns them.
        """
        schedule = PaddedTrainSchedule(
            samples=len(refs),
            micro_batch_size=batch_size,
            global_batch_size=global_batch_size or batch_size * world,
            rank=rank,
            world=world,
            seed=seed,
            left_out=tuple(left_out),
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
        left_out: Sequence[int] = (),
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
            left_out=tuple(left_out),
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

    @property
    def order(self) -> SampleOrder:
        """How the samples of a training are counted. Raises TypeError for a loader of evaluations."""
        if not isinstance(self.schedule, TrainSchedule):
            raise TypeError(f"a training needs a `TrainSchedule`, found a {type(self.schedule).__name__}")
        return SampleOrder(self.schedule.samples, self.schedule.global_batch_size, len(self.schedule.left_out))

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
        return self._iterate(plan)

    def _iterate(self, plan: Iterable[MicroBatch]) -> Iterator[TrainBatch]:
        threads = self._threads if self._prefetch else 0
        with ExitStack() as stopping:
            stopping.callback(self._reader.forget_announced)
            ahead = stopping.enter_context(BatchPrefetcher(threads, self._device, self._reader.stop_waiting))
            for batch in self._reader.announce(self._refs, plan):
                ahead.put(partial(self._reader.read, self._refs, batch))
                if len(ahead) > self._prefetch:
                    yield ahead.take()
            while ahead:
                yield ahead.take()
