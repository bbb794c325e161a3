"""What a training asks of its loader; planned sets and streams in arrival order answer alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from draftworks.features.contracts import TrainBatch


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
