"""DSpark's loss, of whole distributions over the target's vocabulary, without ever holding the logits.

With frozen head W, projection P, states z and narrow Markov features n, a row's logits are W·z + P·n and p is their softmax;
its teacher is q = softmax(W·last) at the position before its label. The row costs

    w·(ce_weight·CE + tv_weight·‖q - p‖₁ + confidence_weight·BCE(confidence, a)),   a = clamp(1 - ½‖q - p‖₁, 0, 1)

CE is that of the label, the token itself. a = Σ_v min(q_v, p_v) is the probability that rejection sampling accepts a token
drawn from p; nothing is learnt through it. Only rows that count are looked at, chunk by chunk of whole blocks.
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
class DSparkObjective:
    """How losses add up.

    Attributes:
        weigh: factors w, from the cross-entropies; taken as constants.
        chunk_blocks: blocks whose distributions are held at a time.
    """

    weigh: LabelWeighting
    ce_weight: float
    tv_weight: float
    confidence_weight: float
    chunk_blocks: int


class DSparkStates(NamedTuple):
    """The R rows that count, in order of block and place.

    Attributes:
        states: (R, H), as the head reads them.
        narrow: (R, r), what the Markov head adds before its projection; r is 0 where there is none.
        confidences: (R,) logits; None without a confidence head.
        positions: (R,) int64, which rows of the teacher teach them.
    """

    states: Tensor
    narrow: Tensor
    confidences: Tensor | None
    positions: Tensor


class DSparkLosses(NamedTuple):
    """`loss` is differentiable; the sums over blocks, float64, are not.

    Attributes:
        loss_sums: (k,), by place, what a label costs before w.
        corrects: (k,), labels that are the first choice.
        acceptance_sums: (k,), of a.
        accepted: scalar, lengths of the prefixes of blocks that are the first choice.
        tau: scalar, Σ over blocks of a_1 + a_1·a_2 + …: accepted proposals to be expected, had the drafts been the labels.
        confidence_errors: (k,), of |σ(confidence) - a|; None without a confidence head.
    """

    loss: Tensor
    loss_sums: Tensor
    corrects: Tensor
    acceptance_sums: Tensor
    accepted: Tensor
    tau: Tensor
    confidence_errors: Tensor | None


def dspark_losses(
    rows: DSparkStates,
    head: Tensor,
    projection: Tensor,
    last: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    objective: DSparkObjective,
) -> DSparkLosses:
    """Losses of the rows that count.

    Args:
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
        last: (N, H), the target's last hidden states.
        labels: (n, k) int64, k labels of n blocks.
        label_mask: (n, k) bool with R that are on; of a block the first ones.
    """
    teacher = _Teacher(last, head)

    def formula(
        chunk: BlockChunk,
        states: Tensor,
        narrow: Tensor,
        confidences: Tensor | None,
        positions: Tensor,
        projection: Tensor,
    ) -> DSparkLosses:
        logits = at_least_float32(F.linear(states, head).addmm(narrow, projection.T))
        log_p = logits.log_softmax(-1)
        ce = F.nll_loss(log_p, chunk.labels, reduction="none")
        q = teacher.distributions(positions, log_p.dtype)
        distance = (log_p.exp() - q).abs().sum(-1)
        a = (1 - distance.detach() / 2).clamp(0, 1)
        cost, errors = objective.ce_weight * ce + objective.tv_weight * distance, None
        if confidences is not None:
            confidences = confidences.to(a.dtype)
            misjudged = F.binary_cross_entropy_with_logits(confidences, a, reduction="none")
            cost = cost + objective.confidence_weight * misjudged
            errors = chunk.scatter((confidences.sigmoid() - a).abs()).sum(0)
        accepted, correct = chunk.scatter(a), chunk.scatter(is_argmax(logits, chunk.labels))
        return DSparkLosses(
            loss=torch.dot(chunk.weights(objective.weigh, ce), cost),
            loss_sums=chunk.scatter(cost).sum(0),
            corrects=correct.sum(0),
            acceptance_sums=accepted.sum(0),
            accepted=correct.cumprod(1).sum(),
            tau=accepted.cumprod(1).sum(),
            confidence_errors=errors,
        )

    return chunked_loss(formula, split_into_chunks(labels, label_mask, objective.chunk_blocks), rows, [projection])


class _Teacher(NamedTuple):
    """The target: its last hidden states (N, H) and its head (V, H)."""

    last: Tensor
    head: Tensor

    def distributions(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(r, V), at the positions (r,). One that teaches several rows is computed once."""
        positions, which = positions.unique(return_inverse=True)
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)
        # As the draft's own are computed: where both agree their difference is 0, not rounding.
        return logits.to(dtype).log_softmax(-1).exp().index_select(0, which)
