"""Both cross-entropies of Domino, of corrected logits and of those beneath them, without ever holding the logits.

With frozen head W, projection P, states z and bottlenecks e, the logits of a row are b = W·z and f = b + P·e, and its
loss is w·((1 - λ)·CE(f) + λ·CE(b)). Gradients of z, e and P are formed in the forward pass while the logits are at hand,
chunk by chunk of whole blocks. Only rows that count get logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.strategies.dflash.loss import Chunk, RowCrossEntropy, Weigh, chunks, row_cross_entropy


@dataclass(frozen=True)
class DominoObjective:
    """How losses add up.

    Attributes:
        weigh: factors from the cross-entropies of the corrected logits, for both losses.
        lambda_base: λ, the share of the base loss, 0 to 1.
        chunk_blocks: blocks whose logits are held at a time.
    """

    weigh: Weigh
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


class DominoRows(NamedTuple):
    """Rows that count, in order of block and place: states (R, H), and bottlenecks (R, E), 0 where nothing is corrected."""

    states: Tensor
    bottlenecks: Tensor


def domino_cross_entropy(
    rows: DominoRows, head: Tensor, projection: Tensor, labels: Tensor, counts: Tensor, objective: DominoObjective
) -> DominoLosses:
    """Losses of the rows that count.

    Args:
        head: (V, H), frozen.
        projection: (V, E), trained.
        labels: (N, k) int64, k labels of N blocks.
        counts: (N, k) bool with R that are on.
    """
    with_grad = torch.is_grad_enabled()
    return DominoLosses(*_DominoCrossEntropy.apply(*rows, head, projection, labels, counts, objective, with_grad))


class _DominoCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, states, bottlenecks, head, projection, labels, counts, objective: DominoObjective, with_grad: bool
    ):
        wide = torch.promote_types(states.dtype, torch.float32)
        share, places = objective.lambda_base, labels.shape[1]
        loss = torch.zeros((), dtype=wide, device=states.device)
        ce_sums = torch.zeros(places, dtype=torch.float64, device=states.device)
        corrected, base = (_Tally(places, states.device) for _ in range(2))
        gradients = _Gradients(states, bottlenecks, head, projection, share) if with_grad else None
        for chunk in chunks(labels, counts, objective.chunk_blocks):
            logits = F.linear(states[chunk.rows], head)
            beneath = row_cross_entropy(logits.to(wide), chunk.labels) if share > 0 else None
            # `max` with its indices is several times faster than `argmax` on a CPU.
            base.add(chunk, logits.max(-1).indices == chunk.labels if beneath is None else beneath.correct)
            logits.addmm_(bottlenecks[chunk.rows], projection.T)
            final = row_cross_entropy(logits.to(wide), chunk.labels)
            corrected.add(chunk, final.correct)
            ce = chunk.by_place(final.ce)
            ce_sums += ce.sum(0)
            weights = objective.weigh(ce, chunk.counted).to(wide)
            loss += (1 - share) * (ce * weights).sum()
            row_weights = weights[chunk.counted]
            if beneath is not None:
                loss += share * (beneath.ce * row_weights).sum()
            if gradients is not None:
                gradients.add(chunk, row_weights, final, beneath)
        if gradients is not None:
            narrow = gradients.d_projection.to(projection.dtype)
            ctx.save_for_backward(gradients.d_states, gradients.d_bottlenecks, narrow)
        sums = (ce_sums, corrected.corrects, corrected.accepted, base.corrects, base.accepted)
        ctx.mark_non_differentiable(*sums)
        return loss, *sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused: Tensor):
        d_states, d_bottlenecks, d_projection = (found * grad_loss.to(found.dtype) for found in ctx.saved_tensors)
        return d_states, d_bottlenecks, None, d_projection, None, None, None, None


class _Tally:
    """Labels that were the first choice, by place, and the prefixes of blocks that were."""

    def __init__(self, places: int, device: torch.device) -> None:
        self.corrects = torch.zeros(places, dtype=torch.float64, device=device)
        self.accepted = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, chunk: Chunk, correct: Tensor) -> None:
        """`correct` (r,) bool. A label that does not count ends no prefix, as in SpecForge, and does not lengthen it."""
        hits = chunk.by_place(correct)
        self.corrects += hits.sum(0)
        self.accepted += ((hits | ~chunk.counted).cumprod(1) * hits).sum()


class _Gradients:
    """Of the loss, chunk after chunk. That of the projection is summed in at least float32.

    Args:
        share: of the base loss.
    """

    def __init__(self, states: Tensor, bottlenecks: Tensor, head: Tensor, projection: Tensor, share: float) -> None:
        self._bottlenecks, self._head, self._projection, self._share = bottlenecks, head, projection, share
        wide = torch.promote_types(states.dtype, torch.float32)
        self.d_states, self.d_bottlenecks = torch.zeros_like(states), torch.zeros_like(bottlenecks)
        self.d_projection = torch.zeros_like(projection, dtype=wide)

    def add(self, chunk: Chunk, weights: Tensor, final: RowCrossEntropy, base: RowCrossEntropy | None) -> None:
        """Weights (r,) of rows multiply the narrow side of each product. The base loss reaches the states alone."""
        rows, dtype = chunk.rows, self._head.dtype
        d_logits = _d_logits(final, chunk.labels)
        through = (weights[:, None] * (1 - self._share)).to(dtype)
        narrow = d_logits.to(dtype)
        self.d_bottlenecks[rows] = (narrow @ self._projection) * through
        self.d_projection += narrow.T @ (self._bottlenecks[rows] * through)
        if base is not None:
            narrow = d_logits.lerp_(_d_logits(base, chunk.labels), self._share).to(dtype)
        self.d_states[rows] = (narrow @ self._head) * weights[:, None].to(dtype)


def _d_logits(found: RowCrossEntropy, labels: Tensor) -> Tensor:
    """softmax - onehot, in the memory of the probabilities."""
    minus_one = found.probabilities.new_full((len(labels), 1), -1.0)
    return found.probabilities.scatter_add_(1, labels[:, None], minus_one)
