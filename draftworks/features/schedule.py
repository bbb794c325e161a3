"""Which samples are in a rank's micro-batches, padded or packed into rows: pure arithmetic, no tensors, alike on every rank.

A packed row is as long as its documents, so nothing is padded, and a row that is not full costs no more than its tokens.
Uneven rows cost waiting, because ranks take rows in turn; `fill_share` measures how even they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from draftworks.errors import ConfigError, DataError
from draftworks.features.contracts import SampleRef

Overlong = Literal["refuse", "own_row"]
"""What happens to a document that is longer than a row may be."""

Row = tuple[int, ...]
"""Indices of the documents of a row, the longest first."""


@dataclass(frozen=True)
class PackLimits:
    """At most `tokens` per row, unless `overlong` gives a longer document a row of its own."""

    tokens: int
    overlong: Overlong = "refuse"


def pack_rows(lengths: Sequence[int], limit: int, multiple: int = 1) -> list[Row]:
    """Pack all documents into rows of at most `limit` tokens, as even as possible.

    Best fit, longest documents first: into the fewest rows found, then again into as many at the lowest limit that
    still holds them (MULTIFIT; Coffman, Garey, Johnson 1978). A document over the limit has a row of its own.

    Args:
        multiple: the number of rows is a multiple of this. Rows are empty only where documents are fewer.

    Returns:
        Rows by descending tokens; deterministic for the same arguments on any machine.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    alone = [(index,) for index in order if lengths[index] > limit]
    others = order[len(alone) :]
    packed = _even_out(others, lengths, _fewest_rows(others, lengths, limit, len(alone), multiple))
    rows = _fill_empty_rows(alone + packed, lengths)
    return sorted(rows, key=lambda row: (-_tokens(row, lengths), row))


def fill_share(rows: Sequence[Row], lengths: Sequence[int]) -> float:
    """Tokens / (rows x longest row): the share of a rectangle around the rows that documents fill."""
    sizes = [_tokens(row, lengths) for row in rows]
    return sum(sizes) / (len(sizes) * max(sizes))


def require_lengths(refs: Sequence[SampleRef], limits: PackLimits) -> tuple[int, ...]:
    """Return the tokens of every sample.

    Raises:
        DataError: a sample is longer than a row and `limits` refuses that, or its length is unknown.
    """
    lengths = tuple(_length(ref) for ref in refs)
    over = [index for index, length in enumerate(lengths) if length > limits.tokens]
    if over and limits.overlong == "refuse":
        longest = max(over, key=lambda index: lengths[index])
        raise DataError(
            f"{len(over)} of {len(refs)} samples do not fit into a row of pack_tokens {limits.tokens}; the longest is "
            f"{refs[longest].sample_id} with {lengths[longest]} tokens. Raise training.pack_tokens to at least "
            f"{lengths[longest]}, or set training.pack_overlong: own_row"
        )
    return lengths


def _length(ref: SampleRef) -> int:
    """Return the token count as captured; for references without a count, the first dimension of any feature."""
    shapes = [spec.shape for spec in ref.feature_specs.values() if spec.shape]
    length = ref.num_tokens or (shapes[0][0] if shapes else 0)
    if length < 1:
        raise DataError(f"sample {ref.sample_id}: its reference does not say how many tokens it has: capture it again")
    return length


def _fewest_rows(order: Sequence[int], lengths: Sequence[int], limit: int, taken: int, multiple: int) -> list[Row]:
    """Pack into the fewest rows that best fit finds, such that with `taken` other rows their number is a multiple."""
    rows = -(-_tokens(order, lengths) // limit)
    while True:
        rows += -(rows + taken) % multiple
        packed = _best_fit(order, lengths, limit, rows)
        if packed is not None:
            return packed
        rows += 1


def _even_out(order: Sequence[int], lengths: Sequence[int], rows: list[Row]) -> list[Row]:
    """Repack into as many rows, the longest as short as a bisection over limits finds."""
    if len(rows) < 2:
        return rows
    low, high = -(-_tokens(order, lengths) // len(rows)), max(_tokens(row, lengths) for row in rows)
    while low < high:
        middle = (low + high) // 2
        packed = _best_fit(order, lengths, middle, len(rows))
        if packed is None:
            low = middle + 1
        else:
            rows, high = packed, max(_tokens(row, lengths) for row in packed)
    return rows


def _fill_empty_rows(rows: list[Row], lengths: Sequence[int]) -> list[Row]:
    """Fill rows that best fit left empty with the shortest document of the longest row, while there are documents."""
    packed = [list(row) for row in rows]
    for empty in (row for row in packed if not row):
        longest = max(packed, key=lambda row: (len(row) > 1, _tokens(row, lengths)))
        if len(longest) > 1:
            empty.append(longest.pop())
    return [tuple(row) for row in packed]


def _best_fit(order: Sequence[int], lengths: Sequence[int], limit: int, rows: int) -> list[Row] | None:
    """Put each document into the fullest row that still holds it; None if one does not fit."""
    packed: list[list[int]] = [[] for _ in range(rows)]
    free = [(limit, row) for row in range(rows)]
    for index in order:
        place = bisect_left(free, (lengths[index], -1))
        if place == rows:
            return None
        room, row = free.pop(place)
        packed[row].append(index)
        insort(free, (room - lengths[index], row))
    return [tuple(row) for row in packed]


def _tokens(indices: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens of some documents."""
    return sum(lengths[index] for index in indices)


@dataclass(frozen=True)
class MicroBatch:
    """Indices of samples.

    Attributes:
        padding: exists only so that every rank makes the same number of forward passes.
        ends_step: whether it is the last of its rank in an optimizer step.
    """

    indices: tuple[int, ...]
    padding: bool = False
    ends_step: bool = True


class BatchSchedule(ABC):
    """The micro-batches of one rank for each epoch."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of every epoch, the same on every rank. In an evaluation every micro-batch is a step."""

    @abstractmethod
    def batches(self, epoch: int, after: int = 0) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of an epoch in order, after `after` steps; as many on every rank."""


@dataclass(frozen=True, kw_only=True)
class TrainSchedule(BatchSchedule):
    """Shuffled training order, a function of (seed, epoch) alone.

    An epoch is one permutation of all samples; optimizer step s takes `global_batch_size` consecutive ones of it. So
    the samples of a step depend neither on ranks nor on how subclasses split it into micro-batches. Samples that do not
    fill a last step are left out of this epoch; another epoch's permutation leaves out others, and no sample counts
    twice.

    A set may lack samples of the population that it was made from, because they have no valid features. The permutation
    is that of the population without them, so leaving a sample out moves no other one before the sample's own place.

    Attributes:
        samples: number of samples in the set.
        left_out: ascending indices, in the population, of the samples that the set lacks.

    Raises:
        ConfigError: the global batch is larger than the set.
    """

    samples: int
    global_batch_size: int
    rank: int = 0
    world: int = 1
    seed: int = 0
    left_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.global_batch_size > self.samples:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is larger than the set of {self.samples} samples: "
                "no optimizer step could be made. Lower training.global_batch_size or use more data"
            )

    @property
    def steps(self) -> int:
        return self.samples // self.global_batch_size

    def batches(self, epoch: int, after: int = 0) -> Iterator[MicroBatch]:
        for samples in self.samples_of_steps(epoch)[after:]:
            yield from self.split_step(samples)

    def samples_of_steps(self, epoch: int) -> np.ndarray:
        """Return the samples of every step, (steps, global_batch_size)."""
        order = shuffle_samples(self.samples, self.left_out, self.seed, epoch)
        return order[: self.steps * self.global_batch_size].reshape(self.steps, self.global_batch_size)

    @abstractmethod
    def split_step(self, samples: np.ndarray) -> list[MicroBatch]:
        """Return this rank's micro-batches of the step that takes these samples; as many on every rank."""


def shuffle_samples(samples: int, left_out: Sequence[int], seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch as indices of the samples in the set, (samples,); see `TrainSchedule`."""
    order = np.random.default_rng([seed, epoch]).permutation(samples + len(left_out))
    if not left_out:
        return order
    kept = order[~np.isin(order, left_out)]
    return kept - np.searchsorted(left_out, kept)


def find_left_out(population: Iterable[str], sample_ids: Iterable[str]) -> tuple[int, ...]:
    """Return the indices in a population of the samples that a set made from it lacks; both are sample ids in order."""
    present = set(sample_ids)
    return tuple(index for index, sample_id in enumerate(population) if sample_id not in present)


@dataclass(frozen=True, kw_only=True)
class PaddedTrainSchedule(TrainSchedule):
    """Micro-batches of equally many samples, dealt to micro-steps and ranks in turn.

    Raises:
        ConfigError: the global batch does not divide into micro-batches.
    """

    micro_batch_size: int

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.world
        if self.global_batch_size % share:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x ranks {self.world} = {share}"
            )
        super().__post_init__()

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.world)

    def split_step(self, samples: np.ndarray) -> list[MicroBatch]:
        mine = samples.reshape(self.accumulation, self.world, self.micro_batch_size)[:, self.rank].tolist()
        return [MicroBatch(tuple(row), ends_step=turn == self.accumulation) for turn, row in enumerate(mine, start=1)]


@dataclass(frozen=True)
class EvaluationSchedule(BatchSchedule):
    """Every sample exactly once, in order; micro-batches are dealt to ranks in turn.

    Ranks that run out get padding batches of one sample, so that collectives match on every rank.
    """

    samples: int
    micro_batch_size: int
    rank: int = 0
    world: int = 1

    @property
    def steps(self) -> int:
        batches = -(-self.samples // self.micro_batch_size)
        return -(-batches // self.world)

    def batches(self, epoch: int = 0, after: int = 0) -> Iterator[MicroBatch]:
        for turn in range(after, self.steps):
            yield self._batch((turn * self.world + self.rank) * self.micro_batch_size)

    def _batch(self, start: int) -> MicroBatch:
        indices = tuple(range(start, min(start + self.micro_batch_size, self.samples)))
        return MicroBatch(indices) if indices else MicroBatch((0,), padding=True)


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
