"""Which samples a rank's micro-batches hold: pure arithmetic, no tensors, the same on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftworks.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """Indices of samples. `padding` ones exist only so that every rank makes the same number of forward passes."""

    indices: tuple[int, ...]
    padding: bool = False


class BatchSchedule(ABC):
    """The micro-batches of one rank for each epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Micro-batches of every rank in every epoch."""

    @abstractmethod
    def batches(self, epoch: int) -> Sequence[MicroBatch]:
        """This rank's micro-batches of an epoch, in order."""


@dataclass(frozen=True)
class TrainSchedule(BatchSchedule):
    """Shuffled training order, a function of (seed, epoch) alone.

    An epoch is one permutation of all samples; optimizer step s takes `global_batch_size` consecutive ones of it, which
    are dealt to micro-steps and ranks in turn. So the samples of a step depend neither on ranks nor on the micro-batch
    size. What does not fill a last step is left out of this epoch: another epoch's permutation leaves out others, no
    sample weighs double, and all ranks always have the same number of micro-batches.

    Raises:
        ConfigError: the global batch does not divide into micro-batches, or is larger than the set.
    """

    samples: int
    micro_batch_size: int
    global_batch_size: int
    rank: int = 0
    world: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.world
        if self.global_batch_size % share:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x ranks {self.world} = {share}"
            )
        if self.global_batch_size > self.samples:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is larger than the set of {self.samples} samples: "
                "no optimizer step could be made. Lower training.global_batch_size or use more data"
            )

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.world)

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return self.samples // self.global_batch_size

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def batches(self, epoch: int) -> list[MicroBatch]:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
        used = order[: self.steps * self.global_batch_size]
        mine = used.reshape(len(self), self.world, self.micro_batch_size)[:, self.rank]
        return [MicroBatch(tuple(row)) for row in mine.tolist()]


@dataclass(frozen=True)
class EvaluationSchedule(BatchSchedule):
    """Every sample exactly once, in order; micro-batches are dealt to ranks in turn.

    Ranks that run out get padding batches of one sample, so that collectives match on every rank.
    """

    samples: int
    micro_batch_size: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        batches = -(-self.samples // self.micro_batch_size)
        return -(-batches // self.world)

    def batches(self, epoch: int = 0) -> list[MicroBatch]:
        starts = [(turn * self.world + self.rank) * self.micro_batch_size for turn in range(len(self))]
        return [self._batch(start) for start in starts]

    def _batch(self, start: int) -> MicroBatch:
        indices = tuple(range(start, min(start + self.micro_batch_size, self.samples)))
        return MicroBatch(indices) if indices else MicroBatch((0,), padding=True)
