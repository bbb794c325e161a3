"""The rule of decisions: fixed values, and what holds of all losses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_toys import draw_walk

from draftworks.decision.record import Choice, Margins, Reference
from draftworks.decision.rule import (
    Loss,
    LossEvidence,
    count_prompts_to_decide,
    decide,
    judge_eval_set,
    subtract_figures,
)
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean
from draftworks.evaluation.ladder.statistics import Interval, Resampling, bootstrap_interval

KEEP, TUNE, RETRAIN, UNDECIDED = Choice.KEEP, Choice.TUNE, Choice.RETRAIN, Choice.UNDECIDED
MARGINS = Margins(0.05, 0.15, 20)
LOSSES = st.floats(-1, 1)
WIDTHS = st.floats(1e-6, 0.5)


def evidence(
    low: float, value: float, high: float, prompts: int = 100, after_tune: str | None = None, eval_set: str = "heldout"
) -> LossEvidence:
    loss = Loss(value, low, high)
    return LossEvidence(
        eval_set, Reference.SAME_PROMPTS, "d", 2.0 - value, 2.0, loss, prompts, prompts, after_tune=after_tune
    )


def former(low: float, value: float, high: float, prompts: int = 100, reference_prompts: int = 100) -> LossEvidence:
    found = evidence(low, value, high, prompts)
    return replace(found, reference=Reference.FORMER_FIGURE, reference_prompts=reference_prompts)


@pytest.mark.parametrize(
    ("low", "value", "high", "choice"),
    [
        (0.0, 0.0, 0.0, UNDECIDED),  # nothing was seen that differs
        (-0.3, -0.2, -0.1, KEEP),
        (0.01, 0.03, 0.05, KEEP),  # the whole interval is at or below the first margin
        (0.01, 0.03, 0.0501, UNDECIDED),
        (0.05, 0.08, 0.11, UNDECIDED),  # the lower bound is not above the first margin
        (0.0501, 0.08, 0.11, TUNE),
        (0.06, 0.14, 0.22, TUNE),
        (0.15, 0.2, 0.25, TUNE),  # the lower bound is not above the second margin
        (0.1501, 0.2, 0.25, RETRAIN),
        (-0.1, 0.2, 0.5, UNDECIDED),
    ],
)
def test_the_interval_is_compared_with_both_margins(low: float, value: float, high: float, choice: Choice):
    assert judge_eval_set(evidence(low, value, high), MARGINS).choice is choice


def test_a_tune_that_did_not_help_is_followed_by_a_training_from_the_start():
    found = decide([evidence(0.06, 0.1, 0.14, after_tune="f")], MARGINS)
    assert (found.choice, found.after_tune, found.figures[0].reason) == (RETRAIN, "f", "the tune f did not help")
    for low, high, choice in ((0.0, 0.04, KEEP), (0.04, 0.14, UNDECIDED)):
        found = decide([evidence(low, (low + high) / 2, high, after_tune="f")], MARGINS)
        assert (found.choice, found.after_tune) == (choice, None)


def test_the_most_urgent_eval_set_counts():
    sets = {
        KEEP: evidence(0, 0, 0.01),
        UNDECIDED: evidence(0, 0.1, 0.2),
        TUNE: evidence(0.06, 0.1, 0.14),
        RETRAIN: evidence(0.2, 0.3, 0.4),
    }
    order = list(sets)
    for index, urgent in enumerate(order):
        for other in order[: index + 1]:
            assert decide([sets[other], sets[urgent]], MARGINS).choice is urgent
            assert decide([sets[urgent], sets[other]], MARGINS).choice is urgent
    assert decide([], MARGINS).choice is UNDECIDED


def test_too_few_prompts_decide_nothing():
    assert judge_eval_set(evidence(0.5, 0.6, 0.7, prompts=20), MARGINS).choice is RETRAIN
    few = judge_eval_set(evidence(0.5, 0.6, 0.7, prompts=19), MARGINS)
    assert (few.choice, few.needed) == (UNDECIDED, 20)
    assert few.reason == "19 prompts, at least 20 are needed, 1 more; about 20 prompts would decide, if the loss stays"
    old = judge_eval_set(former(0.5, 0.6, 0.7, reference_prompts=19), MARGINS)
    assert (old.choice, old.needed) == (UNDECIDED, None)
    assert "former figure is of 19 prompts" in old.reason
    assert judge_eval_set(evidence(0, 0, 0, prompts=0), MARGINS).choice is UNDECIDED


def test_a_loss_that_is_the_same_on_every_prompt_decides_nothing_unless_it_is_of_one_draft():
    for loss in (0.0, 0.1, 0.5):
        found = judge_eval_set(evidence(loss, loss, loss), MARGINS)
        assert (found.choice, found.needed) == (UNDECIDED, None)
        assert "the same on every prompt" in found.reason
    assert judge_eval_set(replace(evidence(0, 0, 0), same_weights=True), MARGINS).choice is KEEP


def test_without_a_loss_only_a_new_eval_set_is_no_reason_to_ask():
    gone = LossEvidence("heldout", Reference.NONE, "d", reason="gone")
    assert judge_eval_set(gone, MARGINS).choice is UNDECIDED
    assert judge_eval_set(replace(gone, is_new=True), MARGINS).choice is KEEP
    assert judge_eval_set(gone, MARGINS).reason == "gone"


@pytest.mark.parametrize(
    ("found", "needed"),
    [
        (evidence(-0.04, 0.01, 0.09, prompts=100), 400),  # 100 x (0.08 / 0.04)^2
        (evidence(0.01, 0.09, 0.2, prompts=100), 401),  # more than 100 x (0.08 / 0.04)^2
        (evidence(0.0, 0.05, 0.1), None),
        (evidence(0.0, 0.0500001, 0.1), None),  # above a million
        (evidence(0.04, 0.04, 0.06, prompts=100), 400),
        (evidence(0.04, 0.09, 0.1, prompts=100), 157),  # more than 156.25
    ],
)
def test_prompts_that_would_decide(found: LossEvidence, needed: int | None):
    result = judge_eval_set(found, MARGINS)
    assert (result.choice, result.needed) == (UNDECIDED, needed)
    assert ("more prompts would not decide" in result.reason) == (needed is None)


def test_prompts_make_the_former_figure_no_more_certain():
    above = former(0.04, 0.09, 0.2)
    loss = above.loss
    assert loss is not None
    sure, half = (replace(above, loss=replace(loss, fixed_below=part)) for part in (0.0, 0.03))
    assert judge_eval_set(sure, MARGINS).needed == 157
    assert judge_eval_set(half, MARGINS).needed == 229  # 100 x (0.05^2 - 0.03^2) / (0.04^2 - 0.03^2) = 228.6
    unsure = replace(above, loss=replace(loss, fixed_below=0.04))
    assert judge_eval_set(unsure, MARGINS).needed is None


def test_a_difference_of_two_figures_has_the_interval_of_the_docs():
    found = subtract_figures(2.5, Interval(2.47, 2.56, 0.95), 2.3, Interval(2.22, 2.34, 0.95))
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2 - 0.05)  # 3-4-5
    assert found.high == pytest.approx(0.2 + 0.1)  # 6-8-10
    assert (found.fixed_below, found.fixed_above) == (pytest.approx(0.03), pytest.approx(0.06))


def test_the_interval_of_two_figures_covers_the_true_loss():
    rng, inside, rounds = np.random.default_rng(1), 0, 150
    resampling = Resampling(resamples=400)
    for _ in range(rounds):
        figures = []
        for mean in (2.5, 2.3):
            walk = draw_walk(mean, 60, rng, rng.normal(0, 0.3, 60))
            value, interval = micro_mean(walk), bootstrap_interval(walk, resampling)
            assert value is not None
            assert interval is not None
            figures += [value, interval]
        loss = subtract_figures(*figures)
        inside += loss.low <= 0.2 <= loss.high
    assert 0.89 <= inside / rounds <= 0.995


@given(LOSSES, WIDTHS, WIDTHS, st.floats(0, 1), st.booleans())
def test_a_larger_loss_is_never_less_urgent(value: float, below: float, above: float, more: float, tuned: bool):
    after = "f" if tuned else None
    first = judge_eval_set(evidence(value - below, value, value + above, after_tune=after), MARGINS).choice
    larger = value + more
    second = judge_eval_set(evidence(larger - below, larger, larger + above, after_tune=after), MARGINS).choice
    order = [KEEP, UNDECIDED, TUNE, RETRAIN]
    assert order.index(second) >= order.index(first)


@given(WIDTHS, WIDTHS, st.integers(20, 10_000))
def test_no_loss_is_kept_with_enough_prompts_and_never_trained_for(below: float, above: float, prompts: int):
    found = judge_eval_set(evidence(-below, 0.0, above, prompts), MARGINS)
    assert found.choice is (KEEP if above <= 0.05 else UNDECIDED)
    if found.choice is UNDECIDED and found.needed is not None:
        shrunk = math.sqrt(prompts / found.needed)
        assert judge_eval_set(evidence(-below, 0.0, above * shrunk * (1 - 1e-9), found.needed), MARGINS).choice is KEEP


@given(LOSSES, WIDTHS, WIDTHS, st.booleans())
def test_nothing_is_trained_within_the_first_margin(value: float, below: float, above: float, tuned: bool):
    found = judge_eval_set(evidence(value - below, value, value + above, after_tune="f" if tuned else None), MARGINS)
    assert found.choice not in (TUNE, RETRAIN) or value - below > 0.05
    assert found.choice is not RETRAIN or tuned or value - below > 0.15
    assert found.choice is not KEEP or value + above <= 0.05


@given(LOSSES, st.floats(0.001, 0.5), st.floats(0.001, 0.5), st.floats(0.1, 10), st.booleans())
def test_the_scale_of_the_figures_does_not_matter(value: float, below: float, above: float, scale: float, tuned: bool):
    after = "f" if tuned else None
    ends = (value - below, value, value + above)
    if any(math.isclose(end, margin, rel_tol=1e-6) for end in ends for margin in (0.05, 0.15)):
        return
    scaled = Margins(0.05 * scale, 0.15 * scale, 20)
    plain = judge_eval_set(evidence(*ends, after_tune=after), MARGINS)
    large = judge_eval_set(evidence(*(end * scale for end in ends), after_tune=after), scaled)
    assert large.choice is plain.choice
    if plain.needed is not None and large.needed is not None:
        assert abs(large.needed - plain.needed) <= 1 + 1e-6 * plain.needed


@given(LOSSES, WIDTHS, WIDTHS, st.integers(1, 500))
def test_so_many_prompts_would_decide_and_not_many_fewer(value: float, below: float, above: float, prompts: int):
    found = evidence(value - below, value, value + above, prompts)
    assert found.loss is not None
    needed = count_prompts_to_decide(found, found.loss, MARGINS)
    judged = judge_eval_set(found, MARGINS)
    if judged.choice is not UNDECIDED or needed is None:
        return
    assert needed > prompts
    assert needed >= MARGINS.least_prompts
    shrink = math.sqrt(prompts / needed) * (1 - 1e-9)
    with_them = evidence(value - below * shrink, value, value + above * shrink, needed)
    assert judge_eval_set(with_them, MARGINS).choice is not UNDECIDED


@given(st.lists(st.tuples(LOSSES, WIDTHS, WIDTHS, st.booleans()), min_size=1, max_size=5), st.randoms())
def test_the_order_of_eval_sets_does_not_matter_for_the_choice(losses, random):
    sets = [
        evidence(value - below, value, value + above, after_tune="f" if tuned else None, eval_set=f"e{index}")
        for index, (value, below, above, tuned) in enumerate(losses)
    ]
    found = decide(sets, MARGINS)
    random.shuffle(sets)
    assert decide(sets, MARGINS).choice is found.choice
    assert (found.after_tune is not None) <= (found.choice is RETRAIN)
    assert len(found.figures) == len(losses)
