"""Domino's loss: cross-entropies of the corrected and the base logits, in chunks of whole blocks.

With frozen head W, projection P, state z and bottleneck e of a label, its base logits are b = W·z, its corrected logits
f = b + P·e, and its loss is w·((1 - λ)·CE(f) + λ·CE(b)). Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import chunked_loss, cross_entropy
from draftworks.strategies.dflash.loss import (
    BlockChunk,
    LabelWeighting,
    at_least_float32,
    is_argmax,
    split_into_chunks,
    sum_prefix_lengths,
)


@dataclass(frozen=True)
class DominoObjective:
    """How the losses of labels add up.

    Attributes:
        weigh: w, from the cross-entropies of the corrected logits, for both losses.
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
        corrects, base_corrects: (k,), number of labels that are the argmax with the correction and without.
        accepted, base_accepted: scalars, total length of the blocks' prefixes that are.
    """

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor
    accepted: Tensor
    base_corrects: Tensor
    base_accepted: Tensor


class DominoStates(NamedTuple):
    """What the labels that count are predicted from, in order of block and place.

    Attributes:
        states: (L, H), normed.
        bottlenecks: (L, E), 0 where nothing is corrected.
    """

    states: Tensor
    bottlenecks: Tensor


def domino_cross_entropy(
    inputs: DominoStates,
    head: Tensor,
    projection: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    objective: DominoObjective,
) -> DominoLosses:
    """Return the loss and the metric sums of the labels that count.

    Args:
        head: (V, H), frozen.
        projection: (V, E), trained.
        labels: (N, k) int64.
        label_mask: (N, k) bool, on at L labels.
    """
    share = objective.lambda_base

    def formula(chunk: BlockChunk, states: Tensor, bottlenecks: Tensor, projection: Tensor) -> DominoLosses:
        base = F.linear(states, head)  # (l, V)
        logits = at_least_float32(base.addmm(bottlenecks, projection.T))  # (l, V)
        hits, base_hits = (chunk.scatter(is_argmax(each, chunk.labels)) for each in (logits, base))  # (n, k)
        cost = ce = cross_entropy(logits, chunk.labels)  # (l,)
        if share > 0:
            cost = (1 - share) * ce + share * cross_entropy(at_least_float32(base), chunk.labels)
        return DominoLosses(
            loss=torch.dot(chunk.label_weights(objective.weigh, ce), cost),
            ce_sums=chunk.scatter(ce).sum(0),
            corrects=hits.sum(0),
            accepted=sum_prefix_lengths(hits, chunk.label_mask),
            base_corrects=base_hits.sum(0),
            base_accepted=sum_prefix_lengths(base_hits, chunk.label_mask),
        )

    return chunked_loss(formula, split_into_chunks(labels, label_mask, objective.chunk_blocks), inputs, [projection])
