"""Schedules of packed rows: every rank gets equally many micro-batches, a padding one where it has no row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftworks.errors import ConfigError
from draftworks.features.packing import Row, pack_rows
from draftworks.features.schedule import BatchSchedule, MicroBatch, TrainSchedule


@dataclass(frozen=True, kw_only=True)
class PackedTrainSchedule(TrainSchedule):
    """The samples of every step in packed rows, as many rows as they need.

    Packing does not decide which samples a step takes, so packed and padded trainings see the same samples and can
    resume from each other's checkpoints.

    Args:
        lengths: tokens of every sample.
        pack_tokens: limit of a row; a longer document has one of its own.

    Raises:
        ConfigError: there are more ranks than samples in a step.
    """

    lengths: tuple[int, ...]
    pack_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch_size < self.world:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} gives {self.world} ranks less than a sample each: raise "
                "training.global_batch_size or lower training.processes"
            )

    def pack_step(self, samples: np.ndarray) -> list[Row]:
        """Return the rows of all ranks for the step that takes these samples."""
        chosen = samples.tolist()
        packed = pack_rows([self.lengths[sample] for sample in chosen], self.pack_tokens, self.world)
        return [tuple(chosen[place] for place in row) for row in packed]

    def split_step(self, samples: np.ndarray) -> list[MicroBatch]:
        *before, last = _share(self.pack_step(samples), self.lengths, self.rank, self.world)
        return [*(replace(batch, ends_step=False) for batch in before), last]


@dataclass(frozen=True, kw_only=True)
class PackedEvaluationSchedule(BatchSchedule):
    """Every sample exactly once, in packed rows."""

    lengths: tuple[int, ...]
    pack_tokens: int
    rank: int = 0
    world: int = 1

    @property
    def steps(self) -> int:
        return len(self._rows()) // self.world

    def batches(self, epoch: int = 0, after: int = 0) -> Iterator[MicroBatch]:
        yield from _share(self._rows(), self.lengths, self.rank, self.world)[after:]

    def _rows(self) -> list[Row]:
        return pack_rows(self.lengths, self.pack_tokens, self.world)


def _share(rows: Sequence[Row], lengths: Sequence[int], rank: int, world: int) -> list[MicroBatch]:
    """Return this rank's rows, one of every turn.

    Rows come by descending tokens, so rows of a turn are of similar length; the order of ranks alternates from turn to
    turn, so that no rank has the longest row of every turn.
    """
    if not rows:
        return []
    turns = [rows[start : start + world] for start in range(0, len(rows), world)]
    mine = [turn[rank if number % 2 == 0 else -1 - rank] for number, turn in enumerate(turns)]
    shortest = min((sample for row in rows for sample in row), key=lambda sample: lengths[sample])
    return [MicroBatch(row) if row else MicroBatch((shortest,), padding=True) for row in mine]
