"""Where the samples of a batch lie, so that nothing of one ever reaches another.

A padded batch has one document in every row, a packed one several in its only row. Both are rows with documents; what looks
ahead, counts positions or attends asks here where a document begins and ends, and needs to know no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.features.contracts import TrainBatch


class Run(NamedTuple):
    """Documents of equal length, one directly after the other: `count` of them from position `begin` on."""

    begin: int
    count: int
    length: int

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + self.count * self.length)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of every row of a batch (B, S), the same in all rows.

    Attributes:
        lengths: tokens of the documents of a row, in order; they add up to S.
        begins, ends: (S,) int64: of every position, the first of its document and the one after its last.
    """

    lengths: tuple[int, ...]
    begins: Tensor
    ends: Tensor

    @classmethod
    def of(cls, batch: TrainBatch) -> Documents:
        ids = batch["input_ids"]
        return cls.from_lengths(batch.documents or (ids.shape[1],), ids.device)

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Documents:
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        return cls(lengths, *(each.repeat_interleave(sizes).to(device) for each in (ends - sizes, ends)))

    @property
    def has_several(self) -> bool:
        """Whether a row has more than one."""
        return len(self.lengths) > 1

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """(S,) int64: of every token, its place in its document."""
        return torch.arange(len(self.begins), device=self.begins.device) - self.begins

    @cached_property
    def document_ids(self) -> Tensor:
        """(S,) int64: of every token, which document of the row it belongs to."""
        return (self.positions == 0).cumsum(0) - 1

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The documents again, those of equal length taken together: what one kernel can do at once."""
        runs: list[Run] = []
        for begin, length in zip(accumulate(self.lengths, initial=0), self.lengths):
            if runs and runs[-1].length == length:
                runs[-1] = runs[-1]._replace(count=runs[-1].count + 1)
            else:
                runs.append(Run(begin, 1, length))
        return tuple(runs)

    def cu_seqlens(self, rows: int) -> Tensor:
        """(documents · rows + 1,) int32: where each begins among the tokens of so many rows, and where the last ends."""
        length = len(self.begins)
        firsts = torch.arange(rows, device=self.begins.device)[:, None] * length + self._first_tokens
        return F.pad(firsts.flatten(), (0, 1), value=rows * length).to(torch.int32)

    @cached_property
    def _first_tokens(self) -> Tensor:
        """(documents,) int64. Kept: asking a GPU for them makes it wait."""
        return (self.positions == 0).nonzero().squeeze(1)

    def shift_left(self, values: Tensor, distance: int, fill: int = 0) -> Tensor:
        """(B, S) values at so many positions after each; `fill` beyond the end of the document."""
        moved = F.pad(values[:, distance:], (0, min(distance, values.shape[1])), value=fill)
        if not self.has_several:
            return moved
        return moved.masked_fill(self.positions + distance >= self.ends - self.begins, fill)

    def split(self, values: Tensor) -> list[Tensor]:
        """(B, S, …) values of every document by itself, in the order in which the samples were collated."""
        return [part for row in values for part in row.split(self.lengths)]
