"""Loaders of training batches: of planned sets by a schedule, and of references in arrival order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.sample_reader import BatchPrefetcher, Collate, SampleReader
from draftworks.features.schedule import (
    BatchSchedule,
    EvaluationSchedule,
    MicroBatch,
    PackedEvaluationSchedule,
    PackedTrainSchedule,
    PackLimits,
    PaddedTrainSchedule,
    TrainSchedule,
    require_lengths,
)


@dataclass(frozen=True)
class SampleOrder:
    """How the samples of a training are counted.

    Attributes:
        samples: size of the set that every epoch goes through; None for a stream in arrival order, which has one epoch
            and no known end.
        left_out: number of samples that the set lacks of the population whose order it is trained in.
    """

    samples: int | None
    global_batch_size: int
    left_out: int = 0

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.samples is None else self.samples // self.global_batch_size


class TrainingLoader(Protocol):
    """Iterates over one rank's micro-batches, in whole optimizer steps: `FeatureDataLoader`, `QueueDataLoader`."""

    @property
    def order(self) -> SampleOrder: ...

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come after the current iteration, because a stream has ended. The same on every rank."""
        ...

    @property
    def stopped_by(self) -> int:
        """Number of the signal that ended the stream on some rank; 0 if none did."""
        ...

    def prepare_for(self, device: torch.device) -> None:
        """Name the device that batches will go to."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        ...

    def seek(self, steps: int) -> None:
        """Start the next iteration after `steps` optimizer steps of the epoch."""
        ...

    def __iter__(self) -> Iterator[TrainBatch]: ...


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


SplitStep = Callable[[Sequence[SampleRef]], list[MicroBatch]]
"""From the references of a global batch to this rank's micro-batches, as indices of them; as many on every rank."""


class StepSource(Protocol):
    """Global batches in the order of training, the same on every rank: `RefDistributor`."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def step(self) -> int:
        """Optimizer steps whose references were returned, those before a resume included."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        ...

    @property
    def stopped_by(self) -> int:
        """Number of the signal that ended it on some rank; 0 if none did."""
        ...

    def next_step(self, wait: bool = True) -> tuple[SampleRef, ...] | None:
        """Return the references of the next global batch; None if it is over, or none is ready and `wait` is false.

        A collective: every rank calls it equally often with the same `wait`.
        """
        ...


class QueueDataLoader:
    """Iterates over one rank's micro-batches of a stream; the counterpart of `FeatureDataLoader` for arrival order.

    A step has the micro-batches that a planned training with these samples in a step would have. There is one epoch.

    Args:
        source: called from the thread that iterates, never from a reading thread, because its calls are collectives.
        split: see `padded_steps` and `packed_steps`.
        prefetch: micro-batches prepared ahead, if their references have come; whole steps are asked for.
    """

    def __init__(
        self,
        source: StepSource,
        store: FeatureStore,
        split: SplitStep,
        collate: Collate,
        prefetch: int = 2,
        threads: int = 1,
    ) -> None:
        self.source = source
        self._reader = SampleReader(store, collate)
        self._split = split
        self._prefetch = prefetch
        self._threads = threads
        self._device = torch.device("cpu")

    @property
    def order(self) -> SampleOrder:
        return SampleOrder(None, self.source.global_batch_size)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come after what is read ahead."""
        return self.source.is_over

    @property
    def stopped_by(self) -> int:
        """Number of the signal that ended the stream on some rank; 0 if none did."""
        return self.source.stopped_by

    def prepare_for(self, device: torch.device) -> None:
        """Name the device that batches will go to; for a GPU, prefetched batches are pinned. They stay on the CPU."""
        self._device = device

    def set_epoch(self, epoch: int) -> None:
        """Raise ValueError for any epoch but the first: a stream has one."""
        if epoch:
            raise ValueError(f"a stream in arrival order has one epoch, found epoch {epoch}")

    def seek(self, steps: int) -> None:
        """Check that the stream continues after `steps` optimizer steps.

        Raises:
            ValueError: it continues elsewhere. A stream cannot be skipped: what was trained is left out of its queue.
        """
        if steps != self.source.step:
            raise ValueError(f"cannot seek to step {steps}: the stream continues after step {self.source.step}")

    def __iter__(self) -> Iterator[TrainBatch]:
        threads = self._threads if self._prefetch else 0
        with BatchPrefetcher(threads, self._device, self._reader.stop_waiting) as ahead:
            while True:
                self._fill(ahead)
                if not ahead:
                    return
                yield ahead.take()

    def _fill(self, ahead: BatchPrefetcher) -> None:
        """Ask for steps until enough is read ahead; wait for references only if there is nothing to train on meanwhile.

        Ranks hold equally many micro-batches at any time, so all of them ask, and wait, alike.
        """
        while len(ahead) <= self._prefetch and not self.source.is_over:
            refs = self.source.next_step(wait=not ahead)
            if refs is None:
                return
            for batch in self._split(refs):
                ahead.put(partial(self._reader.read, refs, batch))


def padded_steps(global_batch_size: int, micro_batch_size: int, rank: int = 0, world: int = 1) -> SplitStep:
    """Return the split into micro-batches of equally many samples. Raises ConfigError as `PaddedTrainSchedule`."""
    schedule = PaddedTrainSchedule(
        samples=global_batch_size,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        rank=rank,
        world=world,
    )
    return lambda refs: schedule.split_step(np.arange(len(refs)))


def packed_steps(global_batch_size: int, limits: PackLimits, rank: int = 0, world: int = 1) -> SplitStep:
    """Return the split into packed rows; a rank without a last row reads a sample of another rank as padding.

    Raises:
        ConfigError: as `PackedTrainSchedule`.
        DataError: from the split, if a sample does not fit into a row.
    """

    def make_schedule(lengths: tuple[int, ...]) -> PackedTrainSchedule:
        return PackedTrainSchedule(
            samples=len(lengths),
            lengths=lengths,
            pack_tokens=limits.tokens,
            global_batch_size=len(lengths),
            rank=rank,
            world=world,
        )

    make_schedule((1,) * global_batch_size)  # refuses a batch smaller than the ranks before anything is read
    return lambda refs: make_schedule(require_lengths(refs, limits)).split_step(np.arange(len(refs)))
