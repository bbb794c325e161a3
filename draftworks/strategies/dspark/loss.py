"""DSpark's loss: cross-entropy, total variation and confidence error of labels, in chunks of whole blocks.

With frozen head W, projection P, state z and narrow Markov features n of a label, its logits are W·z + P·n, p is their
softmax, and its teacher is q = softmax(W·last) at the position before the label, where both divide their logits by the
teacher's temperature T first. The label costs

    w·(ce_weight·CE + tv_weight·T²·‖q - p‖₁ + confidence_weight·BCE(confidence, a)),   a = clamp(1 - ½‖q - p‖₁, 0, 1)

CE is that of the label, the token itself, at temperature 1. a = Σ_v min(q_v, p_v) is the probability that rejection sampling
at T accepts a token drawn from p; it has no gradient. Only labels that count get logits. Shapes as in draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import chunked_loss, compare_labels, cross_entropy
from draftworks.drafts.objectives import Temperatures, soften
from draftworks.strategies.dflash.loss import BlockChunk, LabelWeighting, at_least_float32, is_argmax, split_into_chunks
from draftworks.strategies.dflash.teacher import Teacher, judge_acceptance


@dataclass(frozen=True)
class DSparkObjective:
    """How the losses of labels add up.

    Attributes:
        weigh: w, from the cross-entropies; a constant for the gradient.
        chunk_blocks: blocks whose distributions are held at a time.
    """

    weigh: LabelWeighting
    ce_weight: float
    tv_weight: float
    confidence_weight: float
    chunk_blocks: int
    temperatures: Temperatures = Temperatures()


class DSparkStates(NamedTuple):
    """What the labels that count are predicted from, in order of block and place.

    Attributes:
        states: (L, H), normed.
        narrow: (L, r), what the Markov head adds before its projection; r is 0 without a Markov head.
        confidences: (L,) logits; None without a confidence head.
        positions: (L,) int64, the teacher positions of the labels.
    """

    states: Tensor
    narrow: Tensor
    confidences: Tensor | None
    positions: Tensor


class DSparkLosses(NamedTuple):
    """`loss` is differentiable; the sums over blocks, float64, are not.

    Attributes:
        loss_sums: (k,), by place, what labels cost before w.
        corrects: (k,), number of labels that are the argmax.
        acceptance_sums: (k,), of a; in evaluations at temperature 1, as `tau`.
        accepted: scalar, total length of the blocks' prefixes that are the argmax.
        tau: scalar, Σ over blocks of a_1 + a_1·a_2 + …: the expected number of accepted proposals, had the proposals
            been the labels.
        confidence_errors: (k,), of |σ(confidence) - a|; None without a confidence head.
        served: (d, k), what servers accept by each of `Temperatures.served`; None without one.
    """

    loss: Tensor
    loss_sums: Tensor
    corrects: Tensor
    acceptance_sums: Tensor
    accepted: Tensor
    tau: Tensor
    confidence_errors: Tensor | None
    served: Tensor | None = None


def dspark_losses(
    inputs: DSparkStates,
    head: Tensor,
    projection: Tensor,
    last: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    objective: DSparkObjective,
) -> DSparkLosses:
    """Return the loss and the metric sums of the labels that count.

    Args:
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
        last: (B·S, H), the target's last hidden states.
        labels: (N, k) int64.
        label_mask: (N, k) bool, on at L labels; in a block, at the first ones.
    """
    teacher, temperatures = Teacher(last, head), objective.temperatures
    distance_weight = 2 * objective.tv_weight * temperatures.loss_factor  # of ½‖q - p‖₁

    def formula(
        chunk: BlockChunk,
        states: Tensor,
        narrow: Tensor,
        confidences: Tensor | None,
        positions: Tensor,
        projection: Tensor,
    ) -> DSparkLosses:
        logits = at_least_float32(F.linear(states, head).addmm(narrow, projection.T))  # (l, V)
        correct = chunk.scatter(is_argmax(logits, chunk.labels))
        served = teacher.measure_acceptance(positions, logits, temperatures.served)
        q = teacher.compute_distributions(positions, logits.dtype, temperatures.teacher)  # (l, V)
        ce, distance = compare_labels(soften(logits, temperatures.teacher), chunk.labels, q)  # (l,) each
        if temperatures.teacher != 1:
            ce = cross_entropy(logits, chunk.labels)
        a = (1 - distance.detach()).clamp(0, 1)
        cost, errors = objective.ce_weight * ce + distance_weight * distance, None
        if confidences is not None:
            confidences = confidences.to(a.dtype)
            misjudged = F.binary_cross_entropy_with_logits(confidences, a, reduction="none")
            cost = cost + objective.confidence_weight * misjudged
            errors = chunk.scatter((confidences.sigmoid() - a).abs()).sum(0)
        accepted = chunk.scatter(a)
        return DSparkLosses(
            loss=torch.dot(chunk.label_weights(objective.weigh, ce), cost),
            loss_sums=chunk.scatter(cost).sum(0),
            corrects=correct.sum(0),
            acceptance_sums=accepted.sum(0),
            accepted=correct.cumprod(1).sum(),
            tau=accepted.cumprod(1).sum(),
            confidence_errors=errors,
            served=None if served is None else torch.stack([chunk.scatter(each).sum(0) for each in served]),
        )

    def measure(temperatures: Temperatures) -> DSparkLosses:
        softened = replace(objective, temperatures=temperatures)
        return dspark_losses(inputs, head, projection, last, labels, label_mask, softened)

    chunks = split_into_chunks(labels, label_mask, objective.chunk_blocks)
    return judge_acceptance(chunked_loss(formula, chunks, inputs, [projection]), temperatures, measure)
