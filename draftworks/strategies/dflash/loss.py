"""Cross-entropy of the labels of blocks under a frozen head, of the rows that count, chunk by chunk of whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.chunked_loss import chunked_loss

Weigh = Callable[[Tensor, Tensor], Tensor]
"""From cross-entropies (N, k) and which of them count (N, k) bool, whole blocks each, to the factors (N, k) of the loss."""


class BlockLosses(NamedTuple):
    """`loss` = Σ CE · weight is differentiable; the sums over blocks, (k,) float64 each, are not."""

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor


def block_cross_entropy(
    states: Tensor, head: Tensor, labels: Tensor, label_mask: Tensor, weigh: Weigh, chunk_blocks: int
) -> BlockLosses:
    """Cross-entropy of the rows that count.

    Args:
        states: (R, H), of the rows that count, in order of block and place.
        head: (V, H), frozen.
        labels: (N, k) int64, k labels of N blocks.
        label_mask: (N, k) bool with R that are on.
        weigh: factors of the loss, from the cross-entropies; taken as constants.
        chunk_blocks: blocks whose logits are held at a time.
    """

    def formula(chunk: Chunk, states: Tensor) -> BlockLosses:
        logits = wide(F.linear(states, head))
        ce = F.cross_entropy(logits, chunk.labels, reduction="none")
        loss = torch.dot(chunk.weights(weigh, ce), ce)
        correct = are_first_choice(logits, chunk.labels)
        return BlockLosses(loss, chunk.by_place(ce).sum(0), chunk.by_place(correct).sum(0))

    return chunked_loss(formula, chunks(labels, label_mask, chunk_blocks), [states])


@dataclass(frozen=True)
class Chunk:
    """Some whole blocks, and those of the counted rows that are theirs.

    Attributes:
        rows: their place among all counted rows, r of them.
        counted: (n, k) bool with r that are on.
        labels: (r,) int64.
    """

    rows: slice
    counted: Tensor
    labels: Tensor

    def by_place(self, values: Tensor) -> Tensor:
        """One value a row, (r,) to (n, k) without gradient, 0 where no label counts."""
        return torch.zeros(self.counted.shape, dtype=values.dtype, device=values.device).masked_scatter_(
            self.counted, values.detach()
        )

    def weights(self, weigh: Weigh, ce: Tensor) -> Tensor:
        """The factors of the loss, (r,), from the cross-entropies (r,)."""
        return weigh(self.by_place(ce), self.counted)[self.counted].to(ce.dtype)


def chunks(labels: Tensor, label_mask: Tensor, chunk_blocks: int) -> Iterator[Chunk]:
    """`chunk_blocks` blocks after the other, without those in which nothing counts, but at least one. Arguments as
    `block_cross_entropy`."""
    rows_after = F.pad(label_mask.sum(1).cumsum(0), (1, 0)).tolist()
    if not rows_after[-1]:
        yield Chunk(slice(0, 0), label_mask[:0], labels[:0].flatten())
    rows_before = [*rows_after[::chunk_blocks], rows_after[-1]]
    for start, begin, end in zip(range(0, len(labels), chunk_blocks), rows_before, rows_before[1:]):
        if begin < end:
            blocks = slice(start, start + chunk_blocks)
            yield Chunk(slice(begin, end), label_mask[blocks], labels[blocks][label_mask[blocks]])


def are_first_choice(logits: Tensor, labels: Tensor) -> Tensor:
    """Which labels (r,) are the argmax of their logits (r, V)."""
    # `max` with its indices is several times faster than `argmax` on a CPU.
    return logits.detach().max(-1).indices == labels


def wide(logits: Tensor) -> Tensor:
    """In at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def uniform(ce: Tensor, counted: Tensor) -> Tensor:
    return counted.to(ce.dtype)


def decaying(gamma: float) -> Weigh:
    """Label k of a block, k from 0, weighs exp(-k / gamma) (DFlash, arXiv 2602.06036)."""

    def weigh(ce: Tensor, counted: Tensor) -> Tensor:
        places = torch.arange(ce.shape[1], device=ce.device, dtype=ce.dtype)
        return counted * torch.exp(-places / gamma)

    return weigh


def dpace(alpha: float, of: str) -> Weigh:
    """The weights of D-PACE.

    With p = exp(-CE) and s = (1 - alpha) p + alpha, 1 where a label does not count, the cumulative confidence of
    label k is prefix_k = Π_{j≤k} s_j, and its value Σ_{j≥k} prefix_j over the labels that count.

    Args:
        of: `dpace` (the value), `dpace_cumulative_confidence` (the prefix) or `dpace_continuation_value` (value / prefix).
    """

    def weigh(ce: Tensor, counted: Tensor) -> Tensor:
        smoothed = torch.where(counted, (1 - alpha) * torch.exp(-ce) + alpha, 1.0)
        prefix = smoothed.cumprod(-1)
        value = (prefix * counted).flip(-1).cumsum(-1).flip(-1)
        weights = {
            "dpace": value,
            "dpace_cumulative_confidence": prefix,
            "dpace_continuation_value": value / prefix.clamp_min(torch.finfo(prefix.dtype).tiny),
        }
        return weights[of] * counted

    return weigh
