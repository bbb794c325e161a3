"""Distillation of the target's next-token distribution over a reduced vocabulary, without ever holding the logits.

The loss of a row is the cross-entropy −Σ_v q_v log p_v with p = softmax(z) of the draft and q the target's distribution,
renormalised over the draft vocabulary; its derivative by z is p − q. So the gradients of states and head are formed in the
forward pass, chunk by chunk of teacher positions, and neither teacher nor draft logits outlive their chunk. A teacher row is
computed once and serves all steps of a test-time-training unroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.supervision import TeacherPlan

CHUNK_ELEMENTS = 2**20
"""Teacher logits held at a time; at least MIN_CHUNK_ROWS rows."""
MIN_CHUNK_ROWS = 64


class Teacher(NamedTuple):
    """The target's side of the loss.

    Attributes:
        last: (N, H) last hidden states, post-norm.
        head: (V, H), frozen.
        draft_ids: (V_d,) int64, target id of every draft id, ascending.
        draft_index: (V,) int64, draft id of every target id, -1 outside the draft vocabulary.
    """

    last: Tensor
    head: Tensor
    draft_ids: Tensor
    draft_index: Tensor


class Distilled(NamedTuple):
    """`loss` = Σ_i step_weights[i]·ce_sums[i] is differentiable; the sums per step, (T,) float64, are not.

    A row whose target argmax lies outside the draft vocabulary adds nothing to any of them.

    Attributes:
        accepted: sum over rows of Σ_v min(q̃_v, p_v), the probability that rejection sampling accepts the draft's token;
            q̃ is the target's distribution over its *whole* vocabulary, as far as it lies in the draft's. None when
            gradients are on: training does not pay for it.
        taught: number of those rows; None with `accepted`.
    """

    loss: Tensor
    ce_sums: Tensor
    corrects: Tensor
    accepted: Tensor | None
    taught: Tensor | None


def distill(
    states: Sequence[Tensor], head: Tensor, teacher: Teacher, plan: TeacherPlan, step_weights: Sequence[float]
) -> Distilled:
    """Cross-entropy of every supervised row against its teacher.

    Args:
        states: per step (R, H), what the draft head is applied to.
        head: (V_d, H), the draft head.
        plan: which rows of the states are supervised by which rows of `teacher.last`.
    """
    with_grad = torch.is_grad_enabled()
    return Distilled(*_Distill.apply(teacher, plan, tuple(step_weights), with_grad, head, *states))


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, teacher: Teacher, plan: TeacherPlan, step_weights, with_grad: bool, head: Tensor, *states: Tensor):
        wide = torch.promote_types(head.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=head.device)
        ce_sums, corrects, accepted, taught = torch.zeros(4, len(states), dtype=torch.float64, device=head.device)
        d_head = torch.zeros_like(head, dtype=wide) if with_grad else None
        d_states = [torch.zeros_like(state) for state in states] if with_grad else []
        rows_at_once = max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // teacher.head.shape[0])
        for start in range(0, plan.positions.numel(), rows_at_once):
            chunk = slice(start, start + rows_at_once)
            lesson = _lesson(teacher, plan.positions[chunk], wide, with_mass=not with_grad)
            rows_by_step = plan.rows[:, chunk][:, lesson.known]
            for step, (state, weight) in enumerate(zip(states, step_weights, strict=True)):
                pupils = _pupils(lesson, rows_by_step[step])
                x = state.index_select(0, pupils.rows)
                result = _soft_cross_entropy(F.linear(x, head).to(wide), pupils, with_grad)
                ce_sums[step] += result.ce
                corrects[step] += result.correct
                loss += weight * result.ce
                if with_grad:
                    d_logits = result.d_logits.to(head.dtype)
                    d_states[step][pupils.rows] = (d_logits @ head).mul_(weight)
                    _accumulate(d_head, d_logits, x * weight)
                else:
                    accepted[step] += result.accepted
                    taught[step] += pupils.rows.numel()
        ctx.mark_non_differentiable(ce_sums, corrects)
        if not with_grad:
            return loss, ce_sums, corrects, accepted, taught
        ctx.save_for_backward(d_head.to(head.dtype), *d_states)
        return loss, ce_sums, corrects, None, None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused: Tensor):
        return (None, None, None, None, *(saved * grad_loss.to(saved.dtype) for saved in ctx.saved_tensors))


class _Lesson(NamedTuple):
    """What one chunk of teacher positions teaches: which of them have a label in the draft vocabulary, and for those
    the distribution (n, V_d), the label as draft id (n,), and the target's probability mass in the draft vocabulary
    (n, 1) where it is asked for."""

    known: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None


def _lesson(teacher: Teacher, positions: Tensor, dtype: torch.dtype, with_mass: bool) -> _Lesson:
    """The head runs in its own dtype, as in the target itself, so that the target's argmax is reproduced."""
    logits = F.linear(teacher.last[positions].to(teacher.head.dtype), teacher.head)
    labels = teacher.draft_index[logits.max(-1).indices]
    known = labels >= 0
    kept = logits[:, teacher.draft_ids]
    if not known.all():
        kept, labels = kept[known], labels[known]
    kept = kept.to(dtype)
    mass = _log_sum_exp(kept).sub_(_log_sum_exp(logits[known].to(dtype))).exp_() if with_mass else None
    return _Lesson(known, kept.softmax(-1), labels, mass)


def _log_sum_exp(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1, keepdim=True)


class _Pupils(NamedTuple):
    """The rows (n,) of one step that a lesson teaches, with their distributions, labels and masses."""

    rows: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None


def _pupils(lesson: _Lesson, rows: Tensor) -> _Pupils:
    taught = (rows >= 0).nonzero().squeeze(1)
    if taught.numel() == rows.numel():
        return _Pupils(rows, lesson.q, lesson.labels, lesson.mass)
    mass = None if lesson.mass is None else lesson.mass[taught]
    return _Pupils(rows[taught], lesson.q.index_select(0, taught), lesson.labels[taught], mass)


class _SoftCrossEntropy(NamedTuple):
    ce: Tensor
    correct: Tensor
    accepted: Tensor | None
    d_logits: Tensor | None


def _soft_cross_entropy(logits: Tensor, pupils: _Pupils, with_grad: bool) -> _SoftCrossEntropy:
    """Sums over rows of cross-entropy, of argmaxes that are the label, of Σ_v min(q̃, p) if the masses are known; p − q."""
    top = logits.max(-1)
    p = logits.softmax(-1)
    lse = top.values - p.gather(1, top.indices[:, None]).squeeze(1).log()
    ce = lse.sum() - torch.dot(pupils.q.view(-1), logits.view(-1))
    accepted = None if pupils.mass is None else torch.minimum(pupils.q * pupils.mass, p).sum()
    correct = (top.indices == pupils.labels).sum()
    return _SoftCrossEntropy(ce, correct, accepted, p.sub_(pupils.q) if with_grad else None)


def _accumulate(total: Tensor, d_logits: Tensor, x: Tensor) -> None:
    if total.dtype == x.dtype:
        total.addmm_(d_logits.T, x)
    else:
        total += d_logits.T @ x
