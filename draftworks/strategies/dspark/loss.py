"""DSpark's loss, of whole distributions over the target's vocabulary, without ever holding the logits.

With frozen head W, projection P, states z and narrow Markov features n, a row's logits are W·z + P·n and p is their softmax;
its teacher is q = softmax(W·last) at the position before its label. The row costs

    w·(ce_weight·CE + tv_weight·‖q - p‖₁ + confidence_weight·BCE(confidence, a)),   a = clamp(1 - ½‖q - p‖₁, 0, 1)

CE is that of the label, the token itself. a = Σ_v min(q_v, p_v) is the probability that rejection sampling accepts a token
drawn from p; nothing is learnt through it. By the logits,

    ∂CE = p - onehot,    ∂‖q - p‖₁ = p ⊙ (s - Σ_v s_v p_v)  with  s = sign(p - q).

Gradients of z, n and P are formed in the forward pass while the distributions are at hand, chunk by chunk of whole blocks. A
position that teaches several rows of a chunk has its distribution computed once. Only rows that count are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.strategies.dflash.loss import Chunk, Weigh, chunks, row_cross_entropy


@dataclass(frozen=True)
class DSparkObjective:
    """How losses add up.

    Attributes:
        weigh: factors w, from the cross-entropies; taken as constants.
        chunk_blocks: blocks whose distributions are held at a time.
    """

    weigh: Weigh
    ce_weight: float
    tv_weight: float
    confidence_weight: float
    chunk_blocks: int


class DSparkRows(NamedTuple):
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
    rows: DSparkRows,
    head: Tensor,
    projection: Tensor,
    last: Tensor,
    labels: Tensor,
    counts: Tensor,
    objective: DSparkObjective,
) -> DSparkLosses:
    """Losses of the rows that count.

    Args:
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
        last: (N, H), the target's last hidden states.
        labels: (n, k) int64, k labels of n blocks.
        counts: (n, k) bool with R that are on; of a block the first ones.
    """
    teacher = _Teacher(last, head, rows.positions)
    with_grad = torch.is_grad_enabled()
    graded = _Graded(
        *_Distributions.apply(rows.states, rows.narrow, projection, teacher, labels, counts, objective, with_grad)
    )
    loss, cost = graded.loss, objective.ce_weight * graded.ce + 2 * objective.tv_weight * (1 - graded.accepted)
    errors = None
    if rows.confidences is not None:
        logits = rows.confidences.to(graded.accepted.dtype)
        misjudged = F.binary_cross_entropy_with_logits(logits, graded.accepted, reduction="none")
        loss = loss + objective.confidence_weight * (graded.weights * misjudged).sum()
        cost = cost + objective.confidence_weight * misjudged.detach()
        errors = _by_place((logits.detach().sigmoid() - graded.accepted).abs(), counts).sum(0)
    correct, accepted = _by_place(graded.correct, counts), _by_place(graded.accepted, counts)
    return DSparkLosses(
        loss=loss,
        loss_sums=_by_place(cost, counts).sum(0),
        corrects=correct.sum(0),
        acceptance_sums=accepted.sum(0),
        accepted=correct.cumprod(1).sum(),
        tau=accepted.cumprod(1).sum(),
        confidence_errors=errors,
    )


class _Graded(NamedTuple):
    """`loss` without that of the confidences, and of every row (R,) its cross-entropy, a, whether the label is the first
    choice, and w; of these nothing is differentiable."""

    loss: Tensor
    ce: Tensor
    accepted: Tensor
    correct: Tensor
    weights: Tensor


class _Teacher(NamedTuple):
    """Row i is taught by the target's distribution at `positions[i]` of `last`."""

    last: Tensor
    head: Tensor
    positions: Tensor

    def distributions(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """(r, V)."""
        positions, which = self.positions[rows].unique(return_inverse=True)
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)
        return logits.to(dtype).softmax(-1).index_select(0, which)


class _Distributions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, narrow, projection, teacher: _Teacher, labels, counts, objective, with_grad: bool):
        wide = torch.promote_types(states.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=states.device)
        ce, accepted, weights = torch.zeros(3, len(states), dtype=wide, device=states.device)
        correct = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        gradients = _Gradients(states, narrow, teacher.head, projection, objective) if with_grad else None
        for chunk in chunks(labels, counts, objective.chunk_blocks):
            rows = chunk.rows
            logits = F.linear(states[rows], teacher.head).addmm_(narrow[rows], projection.T)
            draft = row_cross_entropy(logits.to(wide), chunk.labels)
            del logits
            q = teacher.distributions(rows, wide)
            difference = torch.sub(draft.probabilities, q, out=q)
            distance = torch.linalg.vector_norm(difference, ord=1, dim=-1)
            ce[rows], correct[rows] = draft.ce, draft.correct
            accepted[rows] = (1 - distance / 2).clamp_(0, 1)
            weights[rows] = objective.weigh(chunk.by_place(draft.ce), chunk.counted).to(wide)[chunk.counted]
            cost = objective.ce_weight * draft.ce + objective.tv_weight * distance
            loss += torch.dot(weights[rows], cost)
            if gradients is not None:
                gradients.add(chunk, weights[rows], draft.probabilities, difference.sign_())
        if gradients is not None:
            d_projection = gradients.d_projection.to(projection.dtype)
            ctx.save_for_backward(gradients.d_states, gradients.d_narrow, d_projection)
        ctx.mark_non_differentiable(ce, accepted, correct, weights)
        return loss, ce, accepted, correct, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused: Tensor):
        return (*(found * grad_loss.to(found.dtype) for found in ctx.saved_tensors), *[None] * 5)


class _Gradients:
    """Of the loss, chunk after chunk. That of the projection is summed in at least float32."""

    def __init__(
        self, states: Tensor, narrow: Tensor, head: Tensor, projection: Tensor, objective: DSparkObjective
    ) -> None:
        self._narrow, self._head, self._projection, self._objective = narrow, head, projection, objective
        wide = torch.promote_types(states.dtype, torch.float32)
        self.d_states, self.d_narrow = torch.zeros_like(states), torch.zeros_like(narrow)
        self.d_projection = torch.zeros_like(projection, dtype=wide)

    def add(self, chunk: Chunk, weights: Tensor, p: Tensor, sign: Tensor) -> None:
        """Weights (r,) of rows multiply the narrow side of each product. Overwrites p and sign, (r, V) each."""
        rows, dtype = chunk.rows, self._head.dtype
        d_logits = self._by_logits(chunk.labels, p, sign).to(dtype)
        through = weights[:, None].to(dtype)
        self.d_states[rows] = (d_logits @ self._head) * through
        self.d_narrow[rows] = (d_logits @ self._projection) * through
        self.d_projection += d_logits.T @ (self._narrow[rows] * through)

    def _by_logits(self, labels: Tensor, p: Tensor, sign: Tensor) -> Tensor:
        """See the top of this module."""
        by_ce, by_distance = self._objective.ce_weight, self._objective.tv_weight
        inside = by_ce - by_distance * torch.linalg.vecdot(sign, p)
        d_logits = p.mul_(sign.mul_(by_distance).add_(inside[:, None]))
        return d_logits.scatter_add_(1, labels[:, None], d_logits.new_full((len(labels), 1), -by_ce))


def _by_place(values: Tensor, counts: Tensor) -> Tensor:
    """One value a row, (R,) to (n, k) float64, 0 where no label counts."""
    placed = torch.zeros(counts.shape, dtype=torch.float64, device=values.device)
    return placed.masked_scatter_(counts, values.to(placed.dtype))
