"""Work on some rows of a padded batch only: prompts and padding need keys and values, but no draft of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftworks.drafts.documents import Documents


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
