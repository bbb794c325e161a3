"""Data loader of references in arrival order: whole global batches from a stream, padded or packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.packed_schedule import PackedTrainSchedule
from draftworks.features.packing import PackLimits, require_lengths
from draftworks.features.prefetch import BatchPrefetcher
from draftworks.features.sample_reader import Collate, SampleReader
from draftworks.features.schedule import MicroBatch, PaddedTrainSchedule
from draftworks.features.training_loader import SampleOrder

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
