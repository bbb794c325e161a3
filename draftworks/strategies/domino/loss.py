"""Both cross-entropies of Domino, of corrected logits and of those beneath them, chunk by chunk of whole blocks.

With frozen head W, projection P, states z and bottlenecks e, the logits of a row are b = W·z and f = b + P·e, and its
loss is w·((1 - λ)·CE(f) + λ·CE(b)). Only rows that count get logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.chunked_loss import chunked_loss
from draftworks.strategies.dflash.loss import BlockChunk, LabelWeighting, at_least_float32, is_argmax, split_into_chunks


@dataclass(frozen=True)
class DominoObjective:
    """How losses add up.

    Attributes:
        weigh: factors from the cross-entropies of the corrected logits, for both losses.
        lambda_base: λ, the share of the base loss, 0 to 1.
        chunk_blocks: blocks whose logits are held at a time.
    """

    weigh: LabelWeighting
    lambda_base: float
    chunk_blocks: int


class DominoLosses(NamedTuple):
    """`loss` is differentiable; the sums over blocks, float64, are not.

    Attributes:
        ce_sums: (k,), of the corrected logits.
        corrects, base_corrects: (k,), labels that are the first choice with the correction and without.
        accepted, base_accepted: scalars, lengths of the prefixes of blocks that are.
    """

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor
    accepted: Tensor
    base_corrects: Tensor
    base_accepted: Tensor


class DominoStates(NamedTuple):
    """Rows that count, in order of block and place: states (R, H), and bottlenecks (R, E), 0 where nothing is corrected."""

    states: Tensor
    bottlenecks: Tensor


def domino_cross_entropy(
    rows: DominoStates, head: Tensor, projection: Tensor, labels: Tensor, label_mask: Tensor, objective: DominoObjective
) -> DominoLosses:
    """Losses of the rows that count.

    Args:
        head: (V, H), frozen.
        projection: (V, E), trained.
        labels: (N, k) int64, k labels of N blocks.
        label_mask: (N, k) bool with R that are on.
    """
    share = objective.lambda_base

    def formula(chunk: BlockChunk, states: Tensor, bottlenecks: Tensor, projection: Tensor) -> DominoLosses:
        base = F.linear(states, head)
        logits = at_least_float32(base.addmm(bottlenecks, projection.T))
        cost = ce = F.cross_entropy(logits, chunk.labels, reduction="none")
        if share > 0:
            cost = (1 - share) * ce + share * F.cross_entropy(at_least_float32(base), chunk.labels, reduction="none")
        hits, base_hits = (chunk.scatter(is_argmax(each, chunk.labels)) for each in (logits, base))
        return DominoLosses(
            loss=torch.dot(chunk.weights(objective.weigh, ce), cost),
            ce_sums=chunk.scatter(ce).sum(0),
            corrects=hits.sum(0),
            accepted=_prefixes(hits, chunk.label_mask),
            base_corrects=base_hits.sum(0),
            base_accepted=_prefixes(base_hits, chunk.label_mask),
        )

    return chunked_loss(formula, split_into_chunks(labels, label_mask, objective.chunk_blocks), rows, [projection])


def _prefixes(hits: Tensor, label_mask: Tensor) -> Tensor:
    """Lengths of the prefixes that are right, summed over blocks (n, k). A label that does not count ends no prefix, as in
    SpecForge, and does not lengthen it."""
    return ((hits | ~label_mask).cumprod(1) * hits).sum()
