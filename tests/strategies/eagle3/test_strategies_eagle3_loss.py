from __future__ import annotations

import pytest
import torch

from draftworks.drafts.objectives import (
    Blend,
    CrossEntropy,
    LogAcceptance,
    LossSettings,
    MeanBlend,
    MeanLogAcceptance,
    Teacher,
    TeacherPlan,
    make_teacher_plan,
    token_mean_label_mask,
)
from draftworks.drafts.strategy import StepContext
from draftworks.strategies.eagle3 import loss as losses
from draftworks.strategies.eagle3.loss import distill, number_across_steps

OBJECTIVES = [CrossEntropy(), LogAcceptance(), Blend(3.0, 2.0), MeanLogAcceptance(), MeanBlend(3.0, 2.0, positions=60)]
CONSTANT_SHARE = [
    CrossEntropy(),
    LogAcceptance(),
    Blend(0.6, 0.0),
    MeanLogAcceptance(),
    MeanBlend(0.6, 0.0, positions=60),
]
"""With kl_decay 0: a blend's share is held constant in its gradient, which finite differences would see move."""


def numbered(plan: TeacherPlan, rows: int) -> TeacherPlan:
    return plan._replace(
        draft_positions=number_across_steps(list(plan.draft_positions), [rows] * len(plan.draft_positions))
    )


@pytest.fixture
def case():
    return case_of(rows=30)


def case_of(rows: int):
    generator = torch.Generator().manual_seed(0)
    hidden, vocab, steps = 6, 20, 3
    ids = torch.arange(0, vocab, 2)
    index = torch.full((vocab,), -1)
    index[ids] = torch.arange(len(ids))
    last, *states = torch.randn(1 + steps, rows, hidden, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    draft_head = torch.randn(len(ids), hidden, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, rows // 2, generator=generator) < 0.8
    leaves = [x.clone().requires_grad_() for x in (draft_head, *states)]
    return (
        leaves,
        Teacher(last, head, ids, index),
        numbered(make_teacher_plan(token_mean_label_mask(mask, steps)), rows),
        (1.0, 0.5, 0.25),
    )


TRAINING, JUDGING = LossSettings(StepContext(training=True)), LossSettings(StepContext(training=False))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_result_does_not_depend_on_the_chunk_size(case, monkeypatch, objective):
    leaves, teacher, plan, weights = case
    whole = distill(torch.cat(leaves[1:]), leaves[0], teacher, plan, weights, objective, TRAINING)
    expected = torch.autograd.grad(whole.loss, leaves)
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(losses, "MIN_CHUNK_LABELS", 3)
    pieces = distill(torch.cat(leaves[1:]), leaves[0], teacher, plan, weights, objective, TRAINING)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(torch.autograd.grad(pieces.loss, leaves), expected)


@pytest.mark.parametrize("objective", CONSTANT_SHARE)
def test_gradients_are_those_of_finite_differences(objective):
    """Each number of the leaves is moved both ways, so they are few."""
    leaves, teacher, plan, weights = case_of(rows=12)
    assert plan.teacher_positions.numel() > 5
    torch.autograd.gradcheck(
        lambda head, *states: 3 * distill(torch.cat(states), head, teacher, plan, weights, objective, TRAINING).loss,
        leaves,
    )


def test_draft_equal_to_the_teacher_has_no_gradient_and_is_always_right(case):
    leaves, teacher, plan, weights = case
    everything = torch.arange(len(teacher.head))
    teacher = teacher._replace(draft_ids=everything, draft_index=everything)
    head = teacher.head.clone().requires_grad_()
    states = [teacher.last.roll(-1 - step, 0).requires_grad_() for step in range(len(weights))]
    result = distill(torch.cat(states), head, teacher, plan, weights, CrossEntropy(), TRAINING)
    assert result.sums["acc_corrects"].tolist() == (plan.draft_positions >= 0).sum(1).tolist()
    for grad in torch.autograd.grad(result.loss, [head, *states]):
        torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_acceptance_does_not_depend_on_the_chunk_size_and_is_certain_for_the_teacher_itself(case, monkeypatch):
    leaves, teacher, plan, weights = case
    everything = torch.arange(len(teacher.head))
    whole_vocabulary = teacher._replace(draft_ids=everything, draft_index=everything)
    own_states = [teacher.last.roll(-1 - step, 0) for step in range(len(weights))]
    with torch.no_grad():
        whole = distill(torch.cat(leaves[1:]), leaves[0], teacher, plan, weights, CrossEntropy(), JUDGING)
        perfect = distill(
            torch.cat(own_states),
            teacher.head,
            whole_vocabulary,
            plan,
            weights,
            CrossEntropy(),
            JUDGING,
        )
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 1)
        monkeypatch.setattr(losses, "MIN_CHUNK_LABELS", 3)
        pieces = distill(torch.cat(leaves[1:]), leaves[0], teacher, plan, weights, CrossEntropy(), JUDGING)
    torch.testing.assert_close(pieces, whole)
    assert (whole.sums["acceptance_sums"] < whole.sums["acceptance_denoms"]).all()
    torch.testing.assert_close(perfect.sums["acceptance_sums"], perfect.sums["acceptance_denoms"])
