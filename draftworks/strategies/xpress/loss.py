"""XPress's loss: that of a pass on the true tokens, of passes on the draft's own, and of the backbone, in chunks of blocks.

With frozen head W, readout R, state h and refiner features n of a label, the logits of a pass are W·h + R·n, those of the
backbone W·h. p is the softmax of such logits, q = softmax(W·last) at the position before the label is its teacher, both of
logits divided by the teacher's temperature T, and a label costs

    c = ce_weight·CE + tv_weight·T²·½‖q - p‖₁

CE is that of the label, the token itself, at temperature 1. (speculators 0.9.0 takes the argmax of q, and the token with `ce_from_data`.) The
loss adds up, over the labels,

    w·c(true tokens) + consistency_weight·mean_j w_j·c(pass j on its own tokens) + base_weight·w_b·c(backbone)

where each weight w comes from the cross-entropies of its own logits. Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import chunked_loss, compare_labels, cross_entropy
from draftworks.drafts.objectives import Temperatures, soften
from draftworks.strategies.dflash.loss import (
    BlockChunk,
    LabelWeighting,
    at_least_float32,
    is_argmax,
    split_into_chunks,
    sum_prefix_lengths,
)
from draftworks.strategies.dflash.teacher import Teacher, judge_acceptance


@dataclass(frozen=True)
class XPressObjective:
    """How the losses of labels add up.

    Attributes:
        weigh: w, from the cross-entropies; a constant for the gradient.
        rounds: number of passes on the draft's own tokens.
        chunk_blocks: blocks whose distributions are held at a time, each pass of a block counted.
    """

    weigh: LabelWeighting
    ce_weight: float
    tv_weight: float
    rounds: int
    consistency_weight: float
    base_weight: float
    chunk_blocks: int
    temperatures: Temperatures = Temperatures()


class XPressStates(NamedTuple):
    """What the labels that count are predicted from, in order of block and place.

    Attributes:
        states: (L, H), normed.
        narrow: (L, 1 + rounds, r), the refiner's features on the true tokens and on those of each round.
        positions: (L,) int64, the teacher positions of the labels.
    """

    states: Tensor
    narrow: Tensor
    positions: Tensor


class XPressLosses(NamedTuple):
    """`loss` is differentiable; the sums over blocks, float64, are not.

    All but the loss and those of the base are of the pass on the true tokens.

    Attributes:
        loss_sums: (k,), by place, what labels cost before w.
        corrects: (k,), number of labels that are the argmax.
        acceptance_sums: (k,), of a = 1 - ½‖q - p‖₁, the probability that rejection sampling accepts; in evaluations at
            temperature 1, as `tau`.
        accepted, base_accepted: scalars, total length of the blocks' prefixes that are the argmax with the refiner and
            without.
        tau: scalar, Σ over blocks of a_1 + a_1·a_2 + …: the expected number of accepted proposals, had the proposals
            been the labels.
        served: (d, k), what servers accept by each of `Temperatures.served`; None without one.
    """

    loss: Tensor
    loss_sums: Tensor
    corrects: Tensor
    acceptance_sums: Tensor
    accepted: Tensor
    base_accepted: Tensor
    tau: Tensor
    served: Tensor | None = None


class _Judged(NamedTuple):
    """Of the labels of a chunk under each of P sets of logits: `ce`, `cost` before w, and ½‖q - p‖₁, (P, l) each."""

    ce: Tensor
    cost: Tensor
    distance: Tensor


def xpress_losses(
    inputs: XPressStates,
    head: Tensor,
    projection: Tensor,
    last: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    objective: XPressObjective,
) -> XPressLosses:
    """Return the loss and the metric sums of the labels that count.

    Args:
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
        last: (B·S, H), the target's last hidden states.
        labels: (N, k) int64.
        label_mask: (N, k) bool, on at L labels.
    """
    teacher, temperatures = Teacher(last, head), objective.temperatures
    distance_weight = objective.tv_weight * temperatures.loss_factor

    def judge(chunk: BlockChunk, logits: Tensor, q: Tensor) -> _Judged:
        labels = chunk.labels.expand(len(logits), -1)  # (P, l)
        ce, distance = compare_labels(soften(logits, temperatures.teacher), labels, q)
        if temperatures.teacher != 1:
            ce = cross_entropy(logits, labels)
        return _Judged(ce, objective.ce_weight * ce + distance_weight * distance, distance.detach())

    def weighted(chunk: BlockChunk, judged: _Judged) -> Tensor:
        """Return the loss of each set of logits, (P,)."""
        weights = [chunk.label_weights(objective.weigh, ce) for ce in judged.ce]
        return (torch.stack(weights) * judged.cost).sum(-1)

    def formula(
        chunk: BlockChunk, states: Tensor, narrow: Tensor, positions: Tensor, projection: Tensor
    ) -> XPressLosses:
        base = F.linear(states, head)[None]  # (1, l, V)
        logits = at_least_float32(F.linear(narrow.transpose(0, 1).contiguous(), projection).add_(base))  # (P, l, V)
        base = at_least_float32(base)
        hits, base_hits = (chunk.scatter(is_argmax(each[0], chunk.labels)) for each in (logits, base))  # (n, k)
        served = teacher.measure_acceptance(positions, logits[0], temperatures.served)
        q = teacher.compute_distributions(positions, base.dtype, temperatures.teacher)  # (l, V)
        judged = judge(chunk, logits, q)
        refined, *rounds = weighted(chunk, judged).unbind()
        loss = refined
        if rounds:
            loss = loss + objective.consistency_weight * torch.stack(rounds).mean()
        if objective.base_weight > 0:
            loss = loss + objective.base_weight * weighted(chunk, judge(chunk, base, q)).sum()
        likely = chunk.scatter((1 - judged.distance[0]).clamp(0, 1))
        return XPressLosses(
            loss=loss,
            loss_sums=chunk.scatter(judged.cost[0]).sum(0),
            corrects=hits.sum(0),
            acceptance_sums=likely.sum(0),
            accepted=sum_prefix_lengths(hits, chunk.label_mask),
            base_accepted=sum_prefix_lengths(base_hits, chunk.label_mask),
            tau=likely.cumprod(1).sum(),
            served=None if served is None else torch.stack([chunk.scatter(each).sum(0) for each in served]),
        )

    # A label has logits in every pass, all of them at once.
    chunk_blocks = max(1, objective.chunk_blocks // (2 + objective.rounds))
    chunks = split_into_chunks(labels, label_mask, chunk_blocks)

    def measure(temperatures: Temperatures) -> XPressLosses:
        softened = replace(objective, temperatures=temperatures)
        return xpress_losses(inputs, head, projection, last, labels, label_mask, softened)

    return judge_acceptance(chunked_loss(formula, chunks, inputs, [projection]), temperatures, measure)
