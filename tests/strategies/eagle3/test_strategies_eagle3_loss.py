"""The LK losses of EAGLE-3, through the whole draft."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from coverings import gate_or_long, pairwise
from eagle3_reference import MASKS, assert_close, assert_trains_as_read, gradients, run
from pydantic import ValidationError

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
from draftworks.strategies.eagle3.options import Eagle3Options

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


LK = [{"objective": "lk_alpha"}, {"objective": "lk_lambda"}, {"objective": "lk_lambda", "kl_scale": 3, "kl_decay": 2}]

LENGTHS, LOSSES = [(torch.float32, 4), (torch.float64, 1), (torch.float64, 13)], ["token_mean", "specforge"]
"""Of a chain, with the dtype in which it is computed."""


@pytest.fixture(params=LK, ids=["alpha", "lambda", "lambda_scaled"])
def lk(request) -> dict:
    return request.param


def samples_of(make_sample, dtype=torch.float64):
    return [make_sample(mask, seed, dtype) for seed, mask in enumerate(MASKS)]


@pytest.mark.parametrize(
    ("lk", "length", "loss"), gate_or_long(product(LK, LENGTHS, LOSSES), pairwise(LK, LENGTHS, LOSSES)), indirect=["lk"]
)
def test_both_modes_train_what_the_reader_of_exports_computes(make_strategy, make_sample, length, loss, lk):
    dtype, ttt_length = length
    strategy = make_strategy(dtype, ttt_length=ttt_length, loss=loss, **lk)
    assert_trains_as_read(strategy, samples_of(make_sample, dtype))


def test_ragged_batch_equals_the_sum_of_single_samples(make_strategy, make_sample, lk):
    strategy, samples = make_strategy(torch.float64, **lk), samples_of(make_sample)
    together = run(strategy, samples)
    whole = gradients(strategy, together.loss_sum)
    singles = [run(strategy, [sample]) for sample in samples]
    assert together.loss_weight == sum(s.loss_weight for s in singles)
    for name, counts in together.metric_sums.items():
        assert_close(counts, sum(s.metric_sums[name] for s in singles), 1e-12, name)
    added_up = gradients(strategy, sum(s.loss_sum for s in singles))
    for name, found in whole.items():
        assert_close(found, added_up[name], 1e-12, name)


def test_padding_changes_nothing(make_strategy, make_sample, lk):
    strategy, samples = make_strategy(torch.float64, **lk), samples_of(make_sample)
    alone = run(strategy, samples)
    padded = run(strategy, [*samples, make_sample([0] * 40, 9, torch.float64)])
    assert_close(padded.loss_sum, alone.loss_sum, 1e-12)
    assert padded.loss_weight == alone.loss_weight


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_evaluation_and_training_give_the_same_numbers(make_strategy, make_sample, loss, lk):
    strategy, samples = make_strategy(torch.float64, loss=loss, **lk), samples_of(make_sample)
    training = run(strategy, samples)
    with torch.no_grad():
        evaluation = run(strategy, samples, training=False)
    weights = [each.loss_weight for each in (training, evaluation)]
    assert_close(training.loss_sum / weights[0], evaluation.loss_sum / weights[1], 1e-12)
    of_evaluations = {"unconditional_acceptance_sums", "unconditional_acceptance_denoms"}
    assert evaluation.metric_sums.keys() - training.metric_sums.keys() == of_evaluations
    by_step = [each.metric_sums["loss_sums"] / each.metric_sums["loss_denoms"] for each in (training, evaluation)]
    assert_close(*by_step, 1e-12)
    for name in training.metric_sums.keys() - {"loss_sums", "loss_denoms"}:
        # Counts are exact; an evaluation's α is summed beside those of labels outside the draft vocabulary.
        tolerance = 1e-14 if name == "acceptance_sums" else 0
        assert_close(training.metric_sums[name], evaluation.metric_sums[name], tolerance)


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
@pytest.mark.parametrize("masks", [[[1]], [[0] * 6, [0, 0, 0]]])
def test_nothing_supervised_costs_nothing_with_finite_gradients(make_strategy, make_sample, loss, masks, lk):
    strategy = make_strategy(loss=loss, **lk)
    output = run(strategy, [make_sample(mask) for mask in masks])
    assert output.loss_sum.item() == 0
    assert all(not grad.any() for grad in gradients(strategy, output.loss_sum).values())


@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
def test_bfloat16_compute_stays_near_float32(make_strategy, make_sample, loss, lk):
    samples = samples_of(make_sample, torch.float32)
    exact, rounded = make_strategy(loss=loss, **lk), make_strategy(loss=loss, **lk)
    for parameter in rounded.model.parameters():
        parameter.data = parameter.data.bfloat16()
    wide, narrow = run(exact, samples), run(rounded, samples)
    assert narrow.loss_sum.item() == pytest.approx(wide.loss_sum.item(), rel=0.02)
    found, expected = gradients(rounded, narrow.loss_sum), gradients(exact, wide.loss_sum)
    for name, grad in found.items():
        assert torch.nn.functional.cosine_similarity(grad.float().flatten(), expected[name].flatten(), dim=0) > 0.98


def test_training_raises_the_acceptance_of_a_batch_seen_again_and_again(make_strategy, make_sample, lk):
    strategy, samples = make_strategy(**lk), samples_of(make_sample, torch.float32)
    optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=6e-3)
    rates = []
    for _ in range(12):
        output = run(strategy, samples)
        (output.loss_sum / output.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(float(output.metric_sums["acceptance_sums"].sum() / output.metric_sums["acceptance_denoms"].sum()))
    assert rates[-1] > rates[0] + 0.2


def test_options_that_an_objective_does_not_have_are_refused():
    with pytest.raises(ValidationError, match="kl_scale and kl_decay belong to objective lk_lambda.*lk_alpha"):
        Eagle3Options(objective="lk_alpha", kl_scale=3.0)
