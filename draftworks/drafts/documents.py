"""Document boundaries of a batch, where attention, labels and positions stop; and a batch's active positions.

A padded batch has one document per batch row, a packed batch several in its only row. Whatever looks ahead, counts
positions or attends reads the boundaries here, so it treats both alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.features.contracts import TrainBatch


@dataclass(frozen=True)
class Run:
    """`count` consecutive documents of equal length, from position `begin` on."""

    begin: int
    count: int
    length: int

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + self.count * self.length)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of the rows of a batch (B, S); the same boundaries in all batch rows.

    Attributes:
        lengths: tokens of each document of a row, in order; they sum to S.
        begins, ends: (S,) int64, for every position the first position of its document and the one after its last.
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
        """Whether a row has more than one document."""
        return len(self.lengths) > 1

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """Position of every token in its document, (S,) int64."""
        return torch.arange(len(self.begins), device=self.begins.device) - self.begins

    @cached_property
    def document_ids(self) -> Tensor:
        """Number of the document that every token belongs to, (S,) int64."""
        return (self.positions == 0).cumsum(0) - 1

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The documents, consecutive ones of equal length merged: one kernel call can process a run."""
        runs: list[Run] = []
        for begin, length in zip(accumulate(self.lengths, initial=0), self.lengths):
            if runs and runs[-1].length == length:
                runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
            else:
                runs.append(Run(begin, 1, length))
        return tuple(runs)

    def cu_seqlens(self, batch_rows: int) -> Tensor:
        """Return cumulative lengths for varlen kernels over flattened batch rows, (documents · batch_rows + 1,) int32."""
        length = len(self.begins)
        firsts = torch.arange(batch_rows, device=self.begins.device)[:, None] * length + self._first_tokens
        return F.pad(firsts.flatten(), (0, 1), value=batch_rows * length).to(torch.int32)

    @cached_property
    def _first_tokens(self) -> Tensor:
        """First position of every document, (documents,) int64. Cached: asking a GPU for it makes the host wait."""
        return (self.positions == 0).nonzero().squeeze(1)

    def shift_left(self, values: Tensor, distance: int, fill: int = 0) -> Tensor:
        """Return (B, S) values `distance` positions ahead of each; `fill` beyond the end of the document."""
        moved = F.pad(values[:, distance:], (0, min(distance, values.shape[1])), value=fill)
        if not self.has_several:
            return moved
        return moved.masked_fill(self.positions + distance >= self.ends - self.begins, fill)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the (B, S, …) values of every document by itself, in the order in which samples were collated."""
        return [part for row in values for part in row.split(self.lengths)]


@dataclass(frozen=True)
class ActivePositions:
    """R chosen positions of a batch of B·S, on which the draft computes; prompts and padding need keys and values only.

    Attributes:
        index: (R,) int64, flat and ascending.
        batch, length: B and S.
        is_all: `index` holds all positions in order, so nothing has to be moved.
    """

    index: Tensor
    batch: int
    length: int
    is_all: bool = False

    @classmethod
    def where(cls, mask: Tensor) -> ActivePositions:
        """Return the positions at which a (B, S) bool mask is on."""
        index = mask.flatten().nonzero().squeeze(1)
        return cls(index, *mask.shape, is_all=index.numel() == mask.numel())

    def gather(self, x: Tensor) -> Tensor:
        """(B, S, W) to (R, W)."""
        flat = x.flatten(0, 1)
        return flat if self.is_all else _Gather.apply(flat, self.index)

    def scatter(self, x: Tensor) -> Tensor:
        """(R, W) to (B, S, W), 0 at positions that were not chosen."""
        flat = x if self.is_all else _Scatter.apply(x, self.index, self.batch * self.length)
        return flat.unflatten(0, (self.batch, self.length))

    def shift(self, distance: int, documents: Documents) -> ActivePositions:
        """Return the positions `distance` after each, or the last one of the document where that is shorter.

        Such an index can hold a position several times: `gather` by it only what gets no gradient.
        """
        row, position = self.index // self.length, self.index % self.length  # (R,) each
        position = torch.minimum(position + distance, documents.ends[position] - 1)
        return replace(self, index=row * self.length + position, is_all=False)

    def renumber(self, positions: Tensor) -> Tensor:
        """Translate flat positions of the batch to their places in `index`; -1 stays -1. All must be chosen positions."""
        place = torch.full((self.batch * self.length + 1,), -1, device=positions.device)
        place[self.index] = torch.arange(self.index.numel(), device=positions.device)
        return place[positions]


class _Gather(torch.autograd.Function):
    """Index (N, W) along its first dimension.

    The gradient is a copy; that of indexing would sort and accumulate. So an index that occurs more than once must have
    zero gradients at each of its occurrences.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.positions = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _scatter(grad, ctx.saved_tensors[0], ctx.positions), None


class _Scatter(torch.autograd.Function):
    """The adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, positions: int) -> Tensor:
        ctx.save_for_backward(index)
        return _scatter(x, index, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _scatter(x: Tensor, index: Tensor, positions: int) -> Tensor:
    whole = x.new_zeros(positions, x.shape[1])
    whole[index] = x
    return whole
