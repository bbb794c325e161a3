"""Documents of a packed batch, and the active positions of a batch: where attention, labels and positions stop.

A padded batch has one document in every row, a packed one several in its only row. Both are rows with documents; what looks
ahead, counts positions or attends asks here where a document begins and ends, and needs to know no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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


@dataclass(frozen=True)
class ActivePositions:
    """R chosen rows of a batch of B·S.

    Attributes:
        index: (R,) int64, flat and ascending.
        batch, length: B and S.
        is_all: `index` is all rows in their order, so nothing has to be moved.
    """

    index: Tensor
    batch: int
    length: int
    is_all: bool = False

    @classmethod
    def where(cls, mask: Tensor) -> ActivePositions:
        """The rows where a (B, S) bool mask is on."""
        index = mask.flatten().nonzero().squeeze(1)
        return cls(index, *mask.shape, is_all=index.numel() == mask.numel())

    def gather(self, x: Tensor) -> Tensor:
        """(B, S, W) -> (R, W)."""
        flat = x.flatten(0, 1)
        return flat if self.is_all else _Gather.apply(flat, self.index)

    def scatter(self, x: Tensor) -> Tensor:
        """(R, W) -> (B, S, W), 0 in rows that were not chosen."""
        flat = x if self.is_all else _Scatter.apply(x, self.index, self.batch * self.length)
        return flat.unflatten(0, (self.batch, self.length))

    def shift(self, distance: int, documents: Documents) -> ActivePositions:
        """The rows so many positions after each, or the last ones of their documents where these are shorter.

        Those may be there several times: `gather` them only where they get no gradient.
        """
        row, place = self.index // self.length, self.index % self.length
        place = torch.minimum(place + distance, documents.ends[place] - 1)
        return replace(self, index=row * self.length + place, is_all=False)

    def renumber(self, rows: Tensor) -> Tensor:
        """Flat row numbers as positions in `index`; -1 stays -1. All of them must be chosen ones."""
        place = torch.full((self.batch * self.length + 1,), -1, device=rows.device)
        place[self.index] = torch.arange(self.index.numel(), device=rows.device)
        return place[rows]


class _Gather(torch.autograd.Function):
    """Rows of (N, W). The gradient is a copy; indexing's own would sort and accumulate. So a row that is taken more than
    once must have zero gradients, wherever it is taken.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _scatter(grad, ctx.saved_tensors[0], ctx.rows), None


class _Scatter(torch.autograd.Function):
    """The adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return _scatter(x, index, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _scatter(x: Tensor, index: Tensor, rows: int) -> Tensor:
    whole = x.new_zeros(rows, x.shape[1])
    whole[index] = x
    return whole
