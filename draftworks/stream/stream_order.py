"""Which samples a training takes at each optimizer step, over all of its epochs; known before anything is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from draftworks.features.schedule import PaddedTrainSchedule

Keep = Literal["until_last_use", "capture_again"]


@dataclass(frozen=True)
class StreamOrder:
    """The samples of every optimizer step, the same as those of `TrainSchedule` on any number of ranks.

    Steps are numbered from 1, as `global_step` is after the step.

    Attributes:
        samples, left_out: of `TrainSchedule`.

    Raises:
        ConfigError: the global batch is larger than the set.
    """

    samples: int
    global_batch_size: int
    seed: int
    total_steps: int
    left_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._samples_of_steps(0)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.global_batch_size

    @property
    def epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.total_steps // self.steps_per_epoch)

    def get_epoch(self, step: int) -> int:
        """Return the epoch of a step, counted from 0."""
        return (step - 1) // self.steps_per_epoch

    def get_samples(self, step: int) -> np.ndarray:
        """Return the indices of the samples of a step, (global_batch_size,)."""
        return self._samples_of_steps(self.get_epoch(step))[(step - 1) % self.steps_per_epoch]

    def find_steps(self, epoch: int) -> np.ndarray:
        """Return the step in which an epoch takes each sample, (samples,); 0 where it leaves the sample out."""
        first = epoch * self.steps_per_epoch + 1
        taken = self._samples_of_steps(epoch)[: self.total_steps - first + 1]
        steps = np.zeros(self.samples, np.int64)
        steps[taken.ravel()] = np.repeat(np.arange(first, first + len(taken)), self.global_batch_size)
        return steps

    def count_common_steps(self, other: StreamOrder) -> int:
        """Return after how many steps this order and another one of the same population part.

        0 if their trainings have not equally many steps, in an epoch or in all: the learning rates would differ.
        """
        if (self.total_steps, self.steps_per_epoch) != (other.total_steps, other.steps_per_epoch):
            return 0
        for epoch in range(self.epochs):
            same = (self._population_of_steps(epoch) == other._population_of_steps(epoch)).all(axis=1)
            if not same.all():
                return min(self.total_steps, epoch * self.steps_per_epoch + int(np.argmin(same)))
        return self.total_steps

    def _population_of_steps(self, epoch: int) -> np.ndarray:
        """Return the samples of every step as indices in the population, (steps, global_batch_size)."""
        kept = np.delete(np.arange(self.samples + len(self.left_out)), self.left_out)
        return kept[self._samples_of_steps(epoch)]

    def _samples_of_steps(self, epoch: int) -> np.ndarray:
        return _get_samples_of_steps(self.samples, self.left_out, self.global_batch_size, self.seed, epoch)


@lru_cache(maxsize=4)
def _get_samples_of_steps(
    samples: int, left_out: tuple[int, ...], global_batch_size: int, seed: int, epoch: int
) -> np.ndarray:
    schedule = PaddedTrainSchedule(
        samples=samples, left_out=left_out, global_batch_size=global_batch_size, micro_batch_size=1, seed=seed
    )
    return schedule.samples_of_steps(epoch)


@dataclass(frozen=True)
class Lifetime:
    """Steps between which the features of each distinct content are held in the store.

    Attributes:
        first: the first step that takes each content, (contents,); 0 where no step does.
        last: the last such step, after which its features are freed.
    """

    first: np.ndarray
    last: np.ndarray


def find_lifetimes(order: StreamOrder, contents: Sequence[int] | np.ndarray, keep: Keep) -> tuple[Lifetime, ...]:
    """Return when features are captured and freed: one lifetime over all epochs, or with `capture_again` one an epoch.

    Args:
        contents: for each sample the index of its content; samples with the same tokens have the same.
    """
    of = np.asarray(contents)
    epochs = [_find_lifetime(order.find_steps(epoch), of) for epoch in range(order.epochs)]
    if keep == "capture_again" or not epochs:
        return tuple(epochs)
    unused = order.total_steps + 1
    first = np.min([np.where(each.first > 0, each.first, unused) for each in epochs], axis=0)
    return (Lifetime(np.where(first == unused, 0, first), np.max([each.last for each in epochs], axis=0)),)


def _find_lifetime(steps: np.ndarray, contents: np.ndarray) -> Lifetime:
    used = steps > 0
    count = int(contents.max(initial=-1)) + 1
    first, last = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(first, contents[used], steps[used])
    np.maximum.at(last, contents[used], steps[used])
    return Lifetime(np.where(last == 0, 0, first), last)
