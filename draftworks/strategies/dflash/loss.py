"""Cross-entropy of the labels of blocks under a frozen head, of the rows that count, chunk by chunk of whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.chunked_loss import chunked_loss

LabelWeighting = Callable[[Tensor, Tensor], Tensor]
"""From cross-entropies (N, k) and which of them count (N, k) bool, whole blocks each, to the factors (N, k) of the loss."""


class BlockLosses(NamedTuple):
    """`loss` = Σ CE · weight is differentiable; the sums over blocks, (k,) float64 each, are not."""

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor


def block_cross_entropy(
    states: Tensor, head: Tensor, labels: Tensor, label_mask: Tensor, weigh: LabelWeighting, chunk_blocks: int
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

    def formula(chunk: BlockChunk, states: Tensor) -> BlockLosses:
        logits = at_least_float32(F.linear(states, head))
        ce = F.cross_entropy(logits, chunk.labels, reduction="none")
        loss = torch.dot(chunk.weights(weigh, ce), ce)
        correct = is_argmax(logits, chunk.labels)
        return BlockLosses(loss, chunk.scatter(ce).sum(0), chunk.scatter(correct).sum(0))

    return chunked_loss(formula, split_into_chunks(labels, label_mask, chunk_blocks), [states])


@dataclass(frozen=True)
class BlockChunk:
    """Some whole blocks, and those of the counted rows that are theirs.

    Attributes:
        index: their place among all counted rows, r of them.
        label_mask: (n, k) bool with r that are on.
        labels: (r,) int64.
    """

    index: slice
    label_mask: Tensor
    labels: Tensor

    def scatter(self, values: Tensor) -> Tensor:
        """One value a row, (r,) to (n, k) without gradient, 0 where no label counts."""
        return torch.zeros(self.label_mask.shape, dtype=values.dtype, device=values.device).masked_scatter_(
            self.label_mask, values.detach()
        )

    def weights(self, weigh: LabelWeighting, ce: Tensor) -> Tensor:
        """The factors of the loss, (r,), from the cross-entropies (r,)."""
        return weigh(self.scatter(ce), self.label_mask)[self.label_mask].to(ce.dtype)


def split_into_chunks(labels: Tensor, label_mask: Tensor, chunk_blocks: int) -> Iterator[BlockChunk]:
    """`chunk_blocks` blocks after the other, without those in which nothing counts, but at least one. Arguments as
    `block_cross_entropy`."""
    rows_after = F.pad(label_mask.sum(1).cumsum(0), (1, 0)).tolist()
    if not rows_after[-1]:
        yield BlockChunk(slice(0, 0), label_mask[:0], labels[:0].flatten())
    rows_before = [*rows_after[::chunk_blocks], rows_after[-1]]
    for start, begin, end in zip(range(0, len(labels), chunk_blocks), rows_before, rows_before[1:]):
        if begin < end:
            blocks = slice(start, start + chunk_blocks)
            yield BlockChunk(slice(begin, end), label_mask[blocks], labels[blocks][label_mask[blocks]])


def is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Which labels (r,) are the argmax of their logits (r, V)."""
    # `max` with its indices is several times faster than `argmax` on a CPU.
    return logits.detach().max(-1).indices == labels


def at_least_float32(logits: Tensor) -> Tensor:
    """In at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def uniform_weights(ce: Tensor, label_mask: Tensor) -> Tensor:
    return label_mask.to(ce.dtype)


def decaying_weights(gamma: float) -> LabelWeighting:
    """Label k of a block, k from 0, weighs exp(-k / gamma) (DFlash, arXiv 2602.06036)."""

    def weigh(ce: Tensor, label_mask: Tensor) -> Tensor:
        places = torch.arange(ce.shape[1], device=ce.device, dtype=ce.dtype)
        return label_mask * torch.exp(-places / gamma)

    return weigh


def dpace_weights(alpha: float, of: str) -> LabelWeighting:
    """The weights of D-PACE.

    With p = exp(-CE) and s = (1 - alpha) p + alpha, 1 where a label does not count, the cumulative confidence of
    label k is prefix_k = Π_{j≤k} s_j, and its value Σ_{j≥k} prefix_j over the labels that count.

    Args:
        of: `dpace` (the value), `dpace_cumulative_confidence` (the prefix) or `dpace_continuation_value` (value / prefix).
    """

    def weigh(ce: Tensor, label_mask: Tensor) -> Tensor:
        smoothed = torch.where(label_mask, (1 - alpha) * torch.exp(-ce) + alpha, 1.0)
        prefix = smoothed.cumprod(-1)
        value = (prefix * label_mask).flip(-1).cumsum(-1).flip(-1)
        weights = {
            "dpace": value,
            "dpace_cumulative_confidence": prefix,
            "dpace_continuation_value": value / prefix.clamp_min(torch.finfo(prefix.dtype).tiny),
        }
        return weights[of] * label_mask

    return weigh
