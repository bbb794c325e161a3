"""The verdict on a change of training: fixed values, invariances, and how often a change that costs too much passes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.relative_loss import (
    RelativeLoss,
    SeedPair,
    judge_relative_loss,
)
from draftworks.evaluation.ladder.statistics import Resampling, compute_student_quantile

FAST = Resampling(resamples=200)


def prompt(sample_id: str, accepted: list[int]) -> PromptAcceptance:
    return PromptAcceptance.from_accepted_counts(sample_id, accepted, emitted=sum(accepted) + len(accepted))


def walk(rates: np.ndarray, seed: tuple[int, ...], passes: int = 40) -> list[PromptAcceptance]:
    rng = np.random.default_rng(seed)
    return [prompt(f"s{i:04}", rng.binomial(5, rate, passes).tolist()) for i, rate in enumerate(rates)]


def simulate(loss: float, seed: int, prompts: int = 200, seeds: int = 2, noise: float = 0.0) -> list[SeedPair]:
    """Walks with a true relative loss, which `noise` moves from seed to seed."""
    rng = np.random.default_rng(seed)
    rates = rng.beta(6, 4, prompts) * 0.9
    pairs = []
    for number in range(seeds):
        kept = 1 - loss + noise * rng.standard_normal()
        pairs.append(SeedPair(walk(rates, (seed, number, 0)), walk(np.clip(rates * kept, 0, 1), (seed, number, 1))))
    return pairs


def test_fixed_values_of_a_small_case():
    without = [prompt("a", [2, 2]), prompt("b", [4, 4]), prompt("c", [3, 3])]
    less = [prompt("a", [2, 2]), prompt("b", [4, 3]), prompt("c", [3, 3]), prompt("only here", [5])]
    found = judge_relative_loss([SeedPair(without, less), SeedPair(without, without)], max_loss=0.02)
    assert found.prompts == 3
    assert found.by_seed == pytest.approx((1 / 18, 0.0))
    assert found.loss == pytest.approx(1 / 36)
    assert found.verdict == "refused"
    # The prompts' variance is 0.0016291 / 3, by their influences -1/54, 5/108 and -1/36; the seeds' is (1/18)^2 / 2 / 2.
    # Student's t with 2.327 degrees of freedom is 3.77.
    assert found.low == pytest.approx(1 / 36 - 3.773 * 0.036258, abs=1e-3)
    assert found.low + found.high == pytest.approx(2 / 36)
    assert json.loads(json.dumps(found.to_json()))["verdict"] == "refused"


def test_undecided_says_how_much_more_would_decide():
    found = judge_relative_loss(simulate(0.005, 3, prompts=20), 0.02, FAST)
    assert found.verdict == "undecided"
    assert found.more > 1
    assert f"About {int(np.ceil(20 * found.more)):,} prompts" in found.describe()
    text = RelativeLoss("undecided", 0.01, -0.01, 0.03, 0.95, (0.0, 0.02), 50, 0.02, 4.0).describe()
    assert text == (
        "undecided: relative loss of the walk +1.00% (-1.00% to +3.00% at 95%) on 50 prompts with 2 seeds, allowed 2.00%. "
        "About 200 prompts and 8 seeds would decide"
    )


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.3027), (5, 2.5706), (30, 2.0423), (1e9, 1.961)])
def test_student_quantiles_are_those_of_the_tables(freedom: float, expected: float):
    assert compute_student_quantile(0.975, freedom) == pytest.approx(expected, rel=2e-3)
    assert compute_student_quantile(0.025, freedom) == pytest.approx(-expected, rel=2e-3)


@given(st.integers(0, 10**6), st.integers(1, 3), st.floats(-0.05, 0.1), st.floats(0.0, 0.1))
def test_the_verdict_follows_from_the_bounds_and_the_order_of_prompts_is_nothing(seed, seeds, loss, max_loss):
    pairs = simulate(loss, seed, prompts=12, seeds=seeds, noise=0.01)
    found = judge_relative_loss(pairs, max_loss, FAST)
    assert found.low <= found.loss <= found.high
    assert (found.verdict == "passed") == (found.high <= max_loss)
    assert (found.verdict == "refused") == (found.high > max_loss and found.loss >= max_loss)
    assert (found.more is not None) == (found.verdict == "undecided")
    turned = [SeedPair(pair.without[::-1], pair.with_change[::-1]) for pair in reversed(pairs)]
    again = judge_relative_loss(turned, max_loss, FAST)
    assert (again.loss, again.verdict) == (pytest.approx(found.loss), found.verdict)


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_equal_counts_on_every_prompt_lose_nothing_and_decide_nothing(seed: int):
    pairs = simulate(0.01, seed, prompts=20)
    same = judge_relative_loss([SeedPair(pair.without, pair.without) for pair in pairs], 0.0, FAST)
    assert (same.loss, same.low, same.high, same.verdict) == (0.0, 0.0, 0.0, "undecided")
    assert same.more is None
    assert "the same on every prompt" in same.describe()


def test_a_draft_that_accepts_nothing_decides_nothing():
    nothing = [prompt("a", [0, 0])]
    found = judge_relative_loss([SeedPair(nothing, nothing)], 0.02)
    assert (found.verdict, found.loss) == ("undecided", None)
    assert "accept nothing" in found.describe()


def test_pairs_without_a_shared_prompt_are_refused():
    with pytest.raises(DataError, match="none: evaluate on one eval set"):
        judge_relative_loss([SeedPair([prompt("a", [1])], [prompt("b", [1])])], 0.02)
    with pytest.raises(DataError, match="one seed or more, found none"):
        judge_relative_loss([], 0.02)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_loss_just_above_the_limit_hardly_ever_passes(noise: float):
    """The nominal rate is 2.5%."""
    verdicts = [judge_relative_loss(simulate(0.021, n, 60, noise=noise), 0.02, FAST).verdict for n in range(120)]
    assert verdicts.count("passed") / len(verdicts) <= 0.06


def test_a_change_that_costs_nothing_passes_once_there_are_enough_prompts():
    verdicts = [judge_relative_loss(simulate(0.0, n, 600, seeds=2), 0.02, FAST).verdict for n in range(12)]
    assert verdicts.count("passed") >= 9
