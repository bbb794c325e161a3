"""Progress of a training through its data, in samples: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training stands after `global_step` optimizer steps.

    Attributes:
        samples, global_batch_size: of this training; how a step is split into micro-batches and ranks does not matter.
            `samples` is None for a stream in arrival order, which has one epoch.
        left_out: number of samples that the set lacks of the population whose order it is trained in. Checkpoints record
            the size of the population: that decides the order.
    """

    samples: int | None
    global_batch_size: int
    global_step: int = 0
    left_out: int = 0

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.samples is None else self.samples // self.global_batch_size

    @property
    def epoch(self) -> int:
        return 0 if self.steps_per_epoch is None else self.global_step // self.steps_per_epoch

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps done of the current epoch."""
        return self.global_step if self.steps_per_epoch is None else self.global_step % self.steps_per_epoch

    @property
    def epoch_samples(self) -> int:
        """Samples seen of the current epoch, over all ranks."""
        return self.epoch_steps * self.global_batch_size

    def after_step(self) -> TrainingProgress:
        return replace(self, global_step=self.global_step + 1)

    def to_json(self) -> dict[str, int | None]:
        return {
            "global_step": self.global_step,
            "epoch": self.epoch,
            "epoch_samples": self.epoch_samples,
            "samples": None if self.samples is None else self.samples + self.left_out,
            "global_batch_size": self.global_batch_size,
        }

    def from_json(self, stored: Mapping[str, Any], where: Path) -> TrainingProgress:
        """Return this training's progress at the step of a checkpoint.

        Raises:
            StoreError: the checkpoint counts samples in other steps or epochs, so that some would be lost or repeated.
        """
        moved = replace(self, global_step=int(stored["global_step"]))
        for key, ours in moved.to_json().items():
            if stored[key] != ours:
                raise StoreError(
                    f"{where}: position: {key}: the checkpoint has {stored[key]}, this training {ours}: it would repeat or "
                    "skip samples"
                )
        return moved
