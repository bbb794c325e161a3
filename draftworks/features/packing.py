"""Packing of documents into rows without padding: how many rows, and which documents in each. Pure arithmetic.

A row is as long as its documents, so nothing is padded, and a row that is not full costs no more than its tokens.
Uneven rows cost waiting, because ranks take rows in turn; `fill_share` measures how even they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftworks.errors import DataError
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
