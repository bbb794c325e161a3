"""Batches: samples collated to padded rows or a packed one, document boundaries, active positions.

A padded batch has one document per batch row, a packed batch several in its only row. Whatever looks ahead, counts
positions or attends reads the boundaries here, so it treats both alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.errors import DataError
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


@dataclass(frozen=True)
class BatchLayout:
    """Where the tokens of each sample go in a batch.

    Attributes:
        shape: (B, S) of the batch.
        slots: batch row and slice of positions of every sample.
        documents: see `TrainBatch`.
    """

    shape: tuple[int, int]
    slots: tuple[tuple[int, slice], ...]
    documents: tuple[int, ...] = ()

    @classmethod
    def padded(cls, lengths: Sequence[int]) -> BatchLayout:
        """One batch row for each sample, filled up on the right to the longest."""
        slots = tuple((row, slice(length)) for row, length in enumerate(lengths))
        return cls((len(lengths), max(lengths)), slots)

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> BatchLayout:
        """One batch row, the samples directly one after the other."""
        ends = list(accumulate(lengths))
        slots = tuple((0, slice(end - length, end)) for end, length in zip(ends, lengths))
        return cls((1, ends[-1]), slots, tuple(lengths))

    def lay_out(self, tensors: Iterable[Tensor]) -> Tensor:
        """Copy each sample's (S_i, …) to its slot of one (B, S, …) tensor, zeros elsewhere."""
        tensors = list(tensors)
        batch = tensors[0].new_zeros((*self.shape, *tensors[0].shape[1:]))
        for slot, tensor in zip(self.slots, tensors, strict=True):
            batch[slot] = tensor
        return batch


def sample_lengths(samples: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Return the number of tokens of each sample."""
    return [len(sample["input_ids"]) for sample in samples]


def collate_features(
    samples: Sequence[Mapping[str, Tensor]],
    sample_ids: Sequence[str],
    features: Sequence[str],
    width: int,
    layout: BatchLayout | None = None,
) -> dict[str, Tensor]:
    """Collate tokens, loss masks and the features side by side; padding is token 0, mask off and features 0.

    Args:
        samples: each has `input_ids` (S,) int64, `loss_mask` (S,) and every feature (S, width).
        layout: default padded.

    Returns:
        `input_ids` (B, S) int64, `loss_mask` (B, S) bool, and `features` (B, S, n · width).

    Raises:
        DataError: a feature has another shape.
    """
    layout = layout or BatchLayout.padded(sample_lengths(samples))
    beside = torch.zeros((*layout.shape, len(features) * width), dtype=samples[0][features[0]].dtype)
    for slot, sample, name in zip(layout.slots, samples, sample_ids, strict=True):
        check_features(sample, features, width, name)
        torch.cat([sample[feature] for feature in features], dim=-1, out=beside[slot])  # (S_i, n · width)
    return {
        "input_ids": layout.lay_out(sample["input_ids"].long() for sample in samples),
        "loss_mask": layout.lay_out(sample["loss_mask"].bool() for sample in samples),
        "features": beside,
    }


def collate_feature(
    samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str], feature: str, width: int, layout: BatchLayout
) -> Tensor:
    """Collate one feature by itself, (B, S, width).

    Raises:
        DataError: it has another shape.
    """
    for sample, name in zip(samples, sample_ids, strict=True):
        check_features(sample, (feature,), width, name)
    return layout.lay_out(sample[feature] for sample in samples)


def collate_with_last(
    samples: Sequence[Mapping[str, Tensor]],
    sample_ids: Sequence[str],
    features: Sequence[str],
    width: int,
    layout: BatchLayout,
) -> dict[str, Tensor]:
    """Collate as `collate_features`, but the last feature, the target's last hidden states, as `last` (B, S, width)."""
    *taps, last = features
    batch = collate_features(samples, sample_ids, taps, width, layout)
    return {**batch, "last": collate_feature(samples, sample_ids, last, width, layout)}


def mask_last_positions(batch: Mapping[str, Tensor], layout: BatchLayout) -> dict[str, Tensor]:
    """Turn off the last position of every sample in `loss_mask`; the mask as it was is kept as `answer_mask`."""
    loss_mask = batch["loss_mask"].clone()
    for row, positions in layout.slots:
        loss_mask[row, positions.stop - 1] = False
    return {**batch, "loss_mask": loss_mask, "answer_mask": batch["loss_mask"]}


def check_features(sample: Mapping[str, Tensor], features: Sequence[str], width: int, name: str) -> None:
    """Raise DataError if a feature does not have `width` values for every token."""
    expected = (len(sample["input_ids"]), width)
    for feature in features:
        found = tuple(sample[feature].shape)
        if found != expected:
            raise DataError(f"sample {name}: feature {feature}: expected shape {expected}, found {found}")
