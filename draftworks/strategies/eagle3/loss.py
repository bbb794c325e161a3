"""Distillation of the target's next-token distribution over a reduced vocabulary, without ever holding the logits.

The gradients of states and head are formed in the forward pass, chunk by chunk of teacher positions, from the objective's
derivative by the logits (see draftworks.drafts.objectives), so that neither teacher nor draft logits outlive their chunk. A
teacher row is computed once and serves all steps of a test-time-training unroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.objectives import BatchObjective, CrossEntropy, Objective
from draftworks.drafts.supervision import TeacherPlan
from draftworks.drafts.teacher import Teacher

CHUNK_ELEMENTS = 2**20
"""Teacher logits held at a time; at least MIN_CHUNK_ROWS rows."""
MIN_CHUNK_ROWS = 64
GPU_CHUNK_ROWS = 2048
"""At least so many on a GPU, which the products of fewer would not fill; with 152,000 tokens about 2 GB."""


class DistillationLosses(NamedTuple):
    """`loss` = Σ_i step_weights[i]·loss_sums[i] is differentiable; the sums per step, (T,) float64, are not.

    A row whose target argmax lies outside the draft vocabulary adds nothing to any of them but `accepted_all`.

    Attributes:
        loss_sums: of the objective over rows.
        accepted: sum over rows of Σ_v min(q̃_v, p_v), the probability that rejection sampling accepts the draft's token;
            q̃ is the target's distribution over its *whole* vocabulary, as far as it lies in the draft's. None in
            training where the objective does not need it: training does not pay for it.
        taught: number of rows that add something.
        accepted_all: `accepted` of all rows, those outside included; None in training.
    """

    loss: Tensor
    loss_sums: Tensor
    corrects: Tensor
    accepted: Tensor | None
    taught: Tensor
    accepted_all: Tensor | None = None


def distill(
    states: Sequence[Tensor],
    head: Tensor,
    teacher: Teacher,
    plan: TeacherPlan,
    step_weights: Sequence[float],
    objective: Objective | BatchObjective,
    training: bool,
) -> DistillationLosses:
    """The objective over every supervised row against its teacher.

    Args:
        states: per step (R, H), what the draft head is applied to.
        head: (V_d, H), the draft head.
        plan: which rows of the states are supervised by which rows of `teacher.last`.
        objective: one made of means over the batch costs a second pass, which takes those means beforehand.
    """
    if isinstance(objective, BatchObjective):
        with torch.no_grad():
            options = (CrossEntropy(), False, True, False)
            means = _Distill.apply(teacher, plan, tuple(step_weights), *options, head, *states)
        seen = DistillationLosses(*means)
        objective = objective.given(seen.accepted, seen.taught)
    options = (objective, torch.is_grad_enabled(), objective.needs_mass or not training, not training)
    return DistillationLosses(*_Distill.apply(teacher, plan, tuple(step_weights), *options, head, *states))


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        teacher: Teacher,
        plan: TeacherPlan,
        step_weights: tuple[float, ...],
        objective: Objective,
        with_grad: bool,
        with_mass: bool,
        anywhere: bool,
        head: Tensor,
        *states: Tensor,
    ):
        wide = torch.promote_types(head.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=head.device)
        sums = torch.zeros(5, len(states), dtype=torch.float64, device=head.device)
        loss_sums, corrects, accepted, taught, missed = sums
        d_head = torch.zeros_like(head, dtype=wide) if with_grad else None
        d_states = [torch.zeros_like(state) for state in states] if with_grad else []
        fewest = GPU_CHUNK_ROWS if head.is_cuda else MIN_CHUNK_ROWS
        rows_at_once = max(fewest, CHUNK_ELEMENTS // teacher.head.shape[0])
        for start in range(0, plan.teacher_positions.numel(), rows_at_once):
            chunk = slice(start, start + rows_at_once)
            lesson = teacher.lesson(plan.teacher_positions[chunk], wide, with_mass, with_missed=anywhere)
            rows_by_step = plan.draft_positions[:, chunk][:, lesson.known]
            if lesson.missed is not None:
                missed += _accepted_of(lesson.missed, plan.draft_positions[:, chunk][:, ~lesson.known], states, head)
            for step, (state, weight) in enumerate(zip(states, step_weights, strict=True)):
                pupils = lesson.pupils(rows_by_step[step])
                x = state.index_select(0, pupils.rows)
                graded = objective.grade(step, F.linear(x, head).to(wide), pupils, with_grad)
                loss_sums[step] += graded.loss
                corrects[step] += graded.correct
                loss += weight * graded.loss
                taught[step] += pupils.rows.numel()
                if with_mass:
                    accepted[step] += graded.accepted
                if with_grad:
                    d_logits = graded.d_logits.to(head.dtype)
                    d_states[step][pupils.rows] = (d_logits @ head).mul_(weight)
                    _accumulate(d_head, d_logits, x * weight)
        if with_grad:
            ctx.save_for_backward(d_head.to(head.dtype), *d_states)
        ctx.mark_non_differentiable(loss_sums, corrects, accepted, taught, missed)
        whole = accepted + missed if anywhere else None
        return loss, loss_sums, corrects, accepted if with_mass else None, taught, whole

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor, *_unused: Tensor):
        return (*[None] * 7, *(saved * grad_loss.to(saved.dtype) for saved in ctx.saved_tensors))


def _accepted_of(whole: Tensor, rows: Tensor, states: Sequence[Tensor], head: Tensor) -> Tensor:
    """(T,) Σ α by step, of the target's probabilities (m, V_d) and the rows (T, m) that they are for, -1 where there is none."""
    accepted = []
    for state, its_rows in zip(states, rows, strict=True):
        there = its_rows >= 0
        p = F.linear(state.index_select(0, its_rows[there]), head).to(whole.dtype).softmax(-1)
        accepted.append(torch.minimum(whole[there], p).sum(dtype=torch.float64))
    return torch.stack(accepted)


def _accumulate(total: Tensor, d_logits: Tensor, x: Tensor) -> None:
    if total.dtype == x.dtype:
        total.addmm_(d_logits.T, x)
    else:
        total += d_logits.T @ x
