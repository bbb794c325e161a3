"""Documents into rows without padding: how many rows, and which documents go into each. Pure arithmetic.

A row is as long as what is in it, so nothing is padded, and one that is not full costs no more than its tokens. What an
uneven packing costs is waiting: ranks take the rows turn by turn. `fill` says how much of that is avoided.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftworks.errors import DataError
from draftworks.features.contracts import SampleRef

Overlong = Literal["refuse", "own_row"]
"""What becomes of a document that is longer than a row may be."""

Row = tuple[int, ...]
"""Indices of the documents of a row, the longest first."""


@dataclass(frozen=True)
class PackLimits:
    """What a row may hold: at most `tokens`, unless `overlong` gives a longer document a row of its own."""

    tokens: int
    overlong: Overlong = "refuse"


def pack_rows(lengths: Sequence[int], limit: int, multiple: int = 1) -> list[Row]:
    """All documents, each in one row, in rows of at most `limit` tokens as even as they come.

    Best fit, longest documents first: into the fewest rows this finds, then again into as many at the lowest limit that
    still holds them (MULTIFIT; Coffman, Garey, Johnson 1978). A document over the limit has a row of its own.

    Args:
        multiple: the number of rows is one of this. Rows are empty only where documents are fewer.

    Returns:
        Rows by descending tokens. The same for the same arguments, whatever the machine.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    alone = [(index,) for index in order if lengths[index] > limit]
    others = order[len(alone) :]
    packed = _evened(others, lengths, _fewest_rows(others, lengths, limit, len(alone), multiple))
    rows = _none_idle(alone + packed, lengths)
    return sorted(rows, key=lambda row: (-_tokens(row, lengths), row))


def fill_share(rows: Sequence[Row], lengths: Sequence[int]) -> float:
    """Tokens / (rows x the longest row): what a rectangle around these rows would hold of documents."""
    sizes = [_tokens(row, lengths) for row in rows]
    return sum(sizes) / (len(sizes) * max(sizes))


def require_lengths(refs: Sequence[SampleRef], limits: PackLimits) -> tuple[int, ...]:
    """Tokens of every sample.

    Raises:
        DataError: a sample is longer than a row, which `limits` refuse; or its length is not known.
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
    """As captured; of references without a count, the rows of any feature."""
    shapes = [spec.shape for spec in ref.feature_specs.values() if spec.shape]
    length = ref.num_tokens or (shapes[0][0] if shapes else 0)
    if length < 1:
        raise DataError(f"sample {ref.sample_id}: its reference does not say how many tokens it has: capture it again")
    return length


def _fewest_rows(order: Sequence[int], lengths: Sequence[int], limit: int, taken: int, multiple: int) -> list[Row]:
    """As few as best fit finds, such that with `taken` others their number is a multiple."""
    rows = -(-_tokens(order, lengths) // limit)
    while True:
        rows += -(rows + taken) % multiple
        packed = _best_fit(order, lengths, limit, rows)
        if packed is not None:
            return packed
        rows += 1


def _evened(order: Sequence[int], lengths: Sequence[int], rows: list[Row]) -> list[Row]:
    """As many rows, the longest of them as short as a bisection over limits finds."""
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


def _none_idle(rows: list[Row], lengths: Sequence[int]) -> list[Row]:
    """Best fit may leave a row empty; while there are documents for it, it gets the shortest of the longest of several."""
    packed = [list(row) for row in rows]
    for empty in (row for row in packed if not row):
        longest = max(packed, key=lambda row: (len(row) > 1, _tokens(row, lengths)))
        if len(longest) > 1:
            empty.append(longest.pop())
    return [tuple(row) for row in packed]


def _best_fit(order: Sequence[int], lengths: Sequence[int], limit: int, rows: int) -> list[Row] | None:
    """Each document into the fullest row that still holds it; None if one does not fit."""
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
    return sum(lengths[index] for index in indices)
