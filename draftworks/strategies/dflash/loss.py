"""DFlash's loss: weighted cross-entropy of the labels of blocks under a frozen head, in chunks of whole blocks.

Shapes: N blocks of k labels each, L of the N·k labels count; n, k and l are those of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import chunked_loss, cross_entropy, find_argmax

LabelWeighting = Callable[[Tensor, Tensor], Tensor]
"""From the cross-entropies (n, k) and the label mask (n, k) bool of whole blocks to the labels' loss weights (n, k)."""


class BlockLosses(NamedTuple):
    """`loss` = Σ CE · weight is differentiable; the sums over blocks, (k,) float64 each, are not."""

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor


def block_cross_entropy(
    states: Tensor, head: Tensor, labels: Tensor, label_mask: Tensor, weigh: LabelWeighting, chunk_blocks: int
) -> BlockLosses:
    """Return the weighted cross-entropy of the labels that count.

    Args:
        states: (L, H), normed, of the labels that count, in order of block and place.
        head: (V, H), frozen.
        labels: (N, k) int64.
        label_mask: (N, k) bool, on at L labels.
        weigh: loss weights from the cross-entropies; constants for the gradient.
        chunk_blocks: blocks whose logits are held at a time.
    """

    def formula(chunk: BlockChunk, states: Tensor) -> BlockLosses:
        logits = at_least_float32(F.linear(states, head))  # (l, V)
        correct = is_argmax(logits, chunk.labels)  # (l,)
        ce = cross_entropy(logits, chunk.labels)  # (l,)
        loss = torch.dot(chunk.label_weights(weigh, ce), ce)
        return BlockLosses(loss, chunk.scatter(ce).sum(0), chunk.scatter(correct).sum(0))

    return chunked_loss(formula, split_into_chunks(labels, label_mask, chunk_blocks), [states])


@dataclass(frozen=True)
class BlockChunk:
    """n whole blocks and their l labels that count; a `LossChunk`.

    Attributes:
        index: these labels among all L.
        label_mask: (n, k) bool, on at l labels.
        labels: (l,) int64.
    """

    index: slice
    label_mask: Tensor
    labels: Tensor

    def scatter(self, values: Tensor) -> Tensor:
        """Return one value per label (l,) at its place in (n, k), detached, 0 at labels that do not count."""
        zeros = torch.zeros(self.label_mask.shape, dtype=values.dtype, device=values.device)
        return zeros.masked_scatter_(self.label_mask, values.detach())

    def label_weights(self, weigh: LabelWeighting, ce: Tensor) -> Tensor:
        """Return the loss weights (l,) from the cross-entropies (l,)."""
        return weigh(self.scatter(ce), self.label_mask)[self.label_mask].to(ce.dtype)


def split_into_chunks(labels: Tensor, label_mask: Tensor, chunk_blocks: int) -> Iterator[BlockChunk]:
    """Yield `chunk_blocks` blocks at a time, without chunks in which no label counts, but at least one chunk.

    Arguments as of `block_cross_entropy`.
    """
    labels_before = F.pad(label_mask.sum(1).cumsum(0), (1, 0)).tolist()  # of each block; last, of all
    if not labels_before[-1]:
        yield BlockChunk(slice(0, 0), label_mask[:0], labels[:0].flatten())
    chunk_begins = [*labels_before[::chunk_blocks], labels_before[-1]]
    for start, begin, end in zip(range(0, len(labels), chunk_blocks), chunk_begins, chunk_begins[1:]):
        if begin < end:
            blocks = slice(start, start + chunk_blocks)
            yield BlockChunk(slice(begin, end), label_mask[blocks], labels[blocks][label_mask[blocks]])


def is_argmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which labels (l,) are the argmax of their logits (l, V), (l,) bool."""
    return find_argmax(logits) == labels


def sum_prefix_lengths(hits: Tensor, label_mask: Tensor) -> Tensor:
    """Return the total length of the correct prefixes of blocks, from hits (n, k).

    A label that does not count neither ends a prefix, as in SpecForge, nor lengthens it.
    """
    return ((hits | ~label_mask).cumprod(1) * hits).sum()


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def uniform_weights(ce: Tensor, label_mask: Tensor) -> Tensor:
    return label_mask.to(ce.dtype)


def decaying_weights(gamma: float) -> LabelWeighting:
    """Return the weighting of DFlash (arXiv 2602.06036): exp(-k / gamma) for label k of a block, k from 0."""

    def weigh(ce: Tensor, label_mask: Tensor) -> Tensor:
        places = torch.arange(ce.shape[1], device=ce.device, dtype=ce.dtype)
        return label_mask * torch.exp(-places / gamma)

    return weigh


def dpace_weights(alpha: float, variant: str) -> LabelWeighting:
    """Return the weighting of D-PACE.

    With p = exp(-CE) and s = (1 - alpha) p + alpha, 1 where a label does not count, the cumulative confidence of
    label k is prefix_k = Π_{j≤k} s_j, and its value Σ_{j≥k} prefix_j over the labels that count.

    Args:
        variant: `dpace` (the value), `dpace_cumulative_confidence` (the prefix) or `dpace_continuation_value`
            (value / prefix).
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
        return weights[variant] * label_mask

    return weigh
