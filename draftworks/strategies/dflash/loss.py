"""Cross-entropy of the labels of blocks under a frozen head, without ever holding the logits.

The head has no gradient, so a row needs only d CE / d state = (softmax(z) - onehot) · head, formed in the forward pass while
its logits are at hand, chunk by chunk of whole blocks. Only rows that count get logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Weigh = Callable[[Tensor, Tensor], Tensor]
"""From cross-entropies (N, k) and which of them count (N, k) bool, whole blocks each, to the factors (N, k) of the loss."""


class BlockLosses(NamedTuple):
    """`loss` = Σ CE · weight is differentiable; the sums over blocks, (k,) float64 each, are not."""

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor


def block_cross_entropy(
    states: Tensor, head: Tensor, labels: Tensor, counts: Tensor, weigh: Weigh, chunk_blocks: int
) -> BlockLosses:
    """Cross-entropy of the rows that count.

    Args:
        states: (R, H), of the rows that count, in order of block and place.
        head: (V, H), frozen.
        labels: (N, k) int64, k labels of N blocks.
        counts: (N, k) bool with R that are on.
        weigh: factors of the loss, from the cross-entropies; taken as constants.
        chunk_blocks: blocks whose logits are held at a time.
    """
    with_grad = torch.is_grad_enabled()
    return BlockLosses(*_BlockCrossEntropy.apply(states, head, labels, counts, weigh, chunk_blocks, with_grad))


class _BlockCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, head, labels, counts, weigh: Weigh, chunk_blocks: int, with_grad: bool):
        wide = torch.promote_types(states.dtype, torch.float32)
        places = labels.shape[1]
        loss = torch.zeros((), dtype=wide, device=states.device)
        ce_sums, corrects = torch.zeros(2, places, dtype=torch.float64, device=states.device)
        d_states = torch.zeros_like(states) if with_grad else None
        for chunk in chunks(labels, counts, chunk_blocks):
            found = row_cross_entropy(F.linear(states[chunk.rows], head).to(wide), chunk.labels)
            ce = chunk.by_place(found.ce)
            weights = weigh(ce, chunk.counted).to(wide)
            loss += (ce * weights).sum()
            ce_sums += ce.sum(0)
            corrects += chunk.by_place(found.correct).sum(0)
            if with_grad:
                weight = weights[chunk.counted][:, None]
                d_logits = found.probabilities.mul_(weight).to(head.dtype)
                d_logits.scatter_add_(1, chunk.labels[:, None], -weight.to(head.dtype))
                d_states[chunk.rows] = d_logits @ head
        ctx.mark_non_differentiable(ce_sums, corrects)
        if with_grad:
            ctx.save_for_backward(d_states)
        return loss, ce_sums, corrects

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused: Tensor):
        (d_states,) = ctx.saved_tensors
        return d_states * grad_loss.to(d_states.dtype), None, None, None, None, None, None


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
        """One value a row, (r,) to (n, k), 0 where no label counts."""
        return torch.zeros(self.counted.shape, dtype=values.dtype, device=values.device).masked_scatter_(
            self.counted, values
        )


def chunks(labels: Tensor, counts: Tensor, chunk_blocks: int) -> Iterator[Chunk]:
    """`chunk_blocks` blocks after the other, without those in which nothing counts. Arguments as `block_cross_entropy`."""
    rows_after = F.pad(counts.sum(1).cumsum(0), (1, 0)).tolist()
    rows_before = [*rows_after[::chunk_blocks], rows_after[-1]]
    for start, begin, end in zip(range(0, len(labels), chunk_blocks), rows_before, rows_before[1:]):
        if begin < end:
            blocks = slice(start, start + chunk_blocks)
            yield Chunk(slice(begin, end), counts[blocks], labels[blocks][counts[blocks]])


class RowCrossEntropy(NamedTuple):
    """Of rows (r,): cross-entropy, whether the label is the argmax, and the probabilities (r, V)."""

    ce: Tensor
    correct: Tensor
    probabilities: Tensor


def row_cross_entropy(logits: Tensor, labels: Tensor) -> RowCrossEntropy:
    """Of logits (r, V) and labels (r,)."""
    top = logits.max(-1)
    of_label = logits.gather(1, labels[:, None]).squeeze(1)
    probabilities = logits.softmax(-1)
    log_sum_exp = top.values - probabilities.gather(1, top.indices[:, None]).squeeze(1).log()
    return RowCrossEntropy(log_sum_exp - of_label, top.indices == labels, probabilities)


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
