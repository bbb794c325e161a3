"""Intervals: what they contain, depend on, and how often they cover; paired comparison of two drafts.
The verdict on a change of training: fixed values, invariances, and how often a change that costs too much passes.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.errors import ConfigError, DataError
from draftworks.evaluation.ladder import statistics
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.relative_loss import (
    RelativeLoss,
    SeedPair,
    judge_relative_loss,
)
from draftworks.evaluation.ladder.statistics import (
    AcceptanceDifference,
    AcceptanceSummary,
    Interval,
    Resampling,
    bootstrap_interval,
    compare_paired,
    compare_unpaired,
    compute_student_quantile,
    summarize_acceptance,
)

DRAFT_TOKENS = 5


def simulated(prompts: int, seed: int, gain: float = 0.0, noise: int = 0) -> list[PromptAcceptance]:
    """Simulate prompts whose length and difficulty the seed decides; drafts differ by `gain` and `noise`."""
    difficulty = np.random.default_rng(seed)
    rates = difficulty.beta(4, 3, size=prompts)
    lengths = difficulty.integers(5, 60, size=prompts)
    passes = np.random.default_rng((seed, noise))
    return [
        of_pass_lengths(f"s{index:04}", passes.binomial(DRAFT_TOKENS, min(rate + gain, 1.0), size=length).tolist())
        for index, (rate, length) in enumerate(zip(rates, lengths))
    ]


def of_pass_lengths(sample_id: str, accepted: list[int]) -> PromptAcceptance:
    return PromptAcceptance.from_accepted_counts(sample_id, accepted, emitted=sum(accepted) + len(accepted))


def width(interval: Interval) -> float:
    return interval.high - interval.low


@pytest.mark.parametrize("prompts", [2, 20, 200])
def test_interval_surrounds_the_mean(prompts: int) -> None:
    data = simulated(prompts, seed=1)
    interval = bootstrap_interval(data)
    assert interval.low < micro_mean(data) < interval.high


def test_an_interval_equals_a_slow_restatement() -> None:
    """Student's t on the influences, and random weights on them with one more that was not seen: the wider on each side."""
    data = simulated(15, seed=2)
    accepted, passes = (np.array([getattr(one, name) for one in data]) for name in ("accepted", "passes"))
    mean = micro_mean(data)
    influences = sorted((accepted - mean * passes) / passes.mean())
    weights = [np.random.default_rng(9).standard_exponential((300, 16))[draw] for draw in range(300)]
    lowest = [2 * influences[0] - influences[2], *influences]
    highest = [2 * influences[-1] - influences[-3], *influences[::-1]]
    low, high = (
        np.quantile([np.average(each, weights=one) for one in weights], at)
        for each, at in ((lowest, 0.1), (highest, 0.9))
    )
    width = 1.3450 * np.std(influences, ddof=1) / math.sqrt(15)  # Student's t with 14 degrees of freedom, of a table
    interval = bootstrap_interval(data, Resampling(confidence=0.8, resamples=300, seed=9))
    assert interval.low == pytest.approx(mean + min(low, -width), abs=1e-4)
    assert interval.high == pytest.approx(mean + max(high, width), abs=1e-4)


@pytest.mark.parametrize(("lost", "upper"), [(3, 0.08518), (10, 0.17622), (30, 0.39983)])
def test_prompts_of_two_kinds_have_the_exact_interval_of_a_share(lost: int, upper: float) -> None:
    """Clopper & Pearson of `lost` prompts of 100, of a table, as the loss of drafts that are equal on the others."""
    before = [of_pass_lengths(f"s{n:03}", [1] * 10) for n in range(100)]
    after = [of_pass_lengths(one.sample_id, [0] * 10) if n < lost else one for n, one in enumerate(before)]
    found = compare_paired(after, before, Resampling(resamples=40_000))
    assert found.difference == pytest.approx(-lost / 100)
    assert found.interval.low == pytest.approx(-upper, abs=0.002)


def test_few_prompts_have_at_least_the_interval_of_student() -> None:
    """Percentiles of five prompts are half as wide: they covered 82%."""
    data = [of_pass_lengths(f"s{n}", [n] * 10) for n in range(1, 6)]
    interval = bootstrap_interval(data)
    assert interval.low <= 3 - 2.776 * math.sqrt(2.5 / 5) + 1e-3
    assert interval.high >= 3 + 2.776 * math.sqrt(2.5 / 5) - 1e-3


def test_more_prompts_shrink_the_interval() -> None:
    widths = [width(bootstrap_interval(simulated(prompts, seed=3))) for prompts in (25, 100, 400)]
    assert widths[1] == pytest.approx(widths[0] / 2, rel=0.4)
    assert widths[2] == pytest.approx(widths[1] / 2, rel=0.4)


def test_more_confidence_widens_the_interval() -> None:
    data = simulated(50, seed=4)
    half, most, nearly_all = (bootstrap_interval(data, Resampling(level)) for level in (0.5, 0.9, 0.99))
    assert nearly_all.low < most.low < half.low < half.high < most.high < nearly_all.high


def test_interval_depends_on_the_seed_and_not_on_the_order_of_prompts() -> None:
    data = simulated(40, seed=5)
    shuffled = random.Random(0).sample(data, len(data))
    first, again = (bootstrap_interval(prompts, Resampling(seed=6)) for prompts in (data, shuffled))
    assert first == again
    assert first != bootstrap_interval(data, Resampling(seed=7))


def test_interval_does_not_depend_on_how_many_draws_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = simulated(33, seed=6)
    whole = bootstrap_interval(data)
    for cells in (1, 33 * 7, 33 * 1999):
        monkeypatch.setattr(statistics, "MAX_DRAWS", cells)
        assert bootstrap_interval(data) == whole


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    truth = DRAFT_TOKENS * 4 / 7  # mean of beta(4, 3), whatever the lengths, which are drawn apart from it
    intervals = [bootstrap_interval(simulated(60, seed), Resampling(0.9, 400)) for seed in range(300)]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals) / len(intervals)
    assert 0.87 < covered < 0.98


def test_prompts_without_a_pass_do_not_move_the_interval() -> None:
    data = simulated(20, seed=7)
    assert bootstrap_interval([*data, of_pass_lengths("s0003b", [])]) == bootstrap_interval(data)
    assert bootstrap_interval([of_pass_lengths("s", [])]) is None


@pytest.mark.parametrize("prompts", [1, 12])
def test_equal_prompts_give_an_interval_without_width(prompts: int) -> None:
    interval = bootstrap_interval([of_pass_lengths(f"s{i}", [0, 1, 3]) for i in range(prompts)])
    assert width(interval) == 0
    assert interval.low == pytest.approx(4 / 3)


def test_sample_evaluated_twice_is_refused_by_name() -> None:
    data = simulated(3, seed=8)
    with pytest.raises(DataError, match="sample s0001: expected once"):
        bootstrap_interval([*data, data[1]])


@pytest.mark.parametrize("wrong", [{"confidence": 95}, {"confidence": 0.0}, {"confidence": 1.0}, {"resamples": 0}])
def test_resampling_that_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
        Resampling(**wrong)


def test_draft_does_not_differ_from_itself() -> None:
    data = simulated(30, seed=9)
    compared, mean = compare_paired(data, list(reversed(data))), micro_mean(data)
    assert compared == AcceptanceDifference(mean, mean, Interval(0.0, 0.0, 0.95), p_value=1.0, prompts=30)


def test_paired_difference_by_hand() -> None:
    a = [of_pass_lengths("x", [2, 2]), of_pass_lengths("y", [1])]
    b = [of_pass_lengths("y", [0, 1]), of_pass_lengths("x", [1, 1])]
    assert compare_paired(a, b).difference == pytest.approx(5 / 3 - 3 / 4)
    # Influences of x: (4 - 10/3) / 1.5 - (2 - 3/2) / 2, those of y the same with the other sign; t is 12.706.
    assert compare_paired(a, b).interval.high == pytest.approx(11 / 12 + 12.706 * (4 / 9 - 1 / 4), rel=1e-3)


def test_paired_difference_changes_sign_with_the_order_of_drafts() -> None:
    a, b = simulated(40, seed=10, noise=1), simulated(40, seed=10, gain=0.05, noise=2)
    forth, back = compare_paired(a, b), compare_paired(b, a)
    assert forth.difference < 0 < back.difference
    assert (forth.difference, forth.interval.low, forth.interval.high) == pytest.approx(
        (-back.difference, -back.interval.high, -back.interval.low)
    )


def test_pairing_sees_a_small_gain_that_two_intervals_do_not() -> None:
    a, b = simulated(60, seed=11, gain=0.05, noise=1), simulated(60, seed=11, noise=2)
    of_a, of_b = bootstrap_interval(a), bootstrap_interval(b)
    paired = compare_paired(a, b)
    assert of_a.low < of_b.high
    assert paired.interval.low > 0
    unpaired = math.hypot(width(of_a), width(of_b))
    assert width(paired.interval) < unpaired / 2


def test_only_prompts_measured_with_both_are_compared() -> None:
    a, b = simulated(20, seed=12, noise=1), simulated(20, seed=12, noise=2)
    b_stopped_early = [*b[2:15], of_pass_lengths("s0015", [])]
    compared = compare_paired(a[:16], b_stopped_early)
    assert (compared.prompts, compared.only_in_a, compared.only_in_b) == (13, 3, 0)
    alone = compare_paired(a[2:15], b[2:15])
    assert (compared.difference, compared.interval) == (alone.difference, alone.interval)


def test_drafts_without_a_common_prompt_are_not_compared() -> None:
    data = simulated(5, seed=13)
    with pytest.raises(DataError, match="found none among 2 and 3"):
        compare_paired(data[:2], data[2:])


def test_summary_by_hand() -> None:
    data = [of_pass_lengths("x", [2, 0]), of_pass_lengths("y", [3, 3, 1]), of_pass_lengths("z", [])]
    assert summarize_acceptance(data) == AcceptanceSummary(
        prompts=3,
        passes=5,
        accepted=9,
        emitted=14,
        micro=9 / 5,
        macro=pytest.approx((1 + 7 / 3) / 2),
        low=0.0,
        high=pytest.approx(9 / 5 + 12.706 * abs(2 - 18 / 5) / 2.5, rel=1e-3),
        confidence=0.95,
        histogram=(1, 1, 1, 2),
        tokens_per_pass=14 / 5,
    )


def test_summary_of_nothing_has_no_ratio() -> None:
    nothing = summarize_acceptance([])
    assert (nothing.prompts, nothing.passes, nothing.histogram) == (0, 0, ())
    assert (nothing.micro, nothing.macro, nothing.low, nothing.high, nothing.tokens_per_pass) == (None,) * 5


@pytest.mark.parametrize("prompts", [0, 12])
def test_summary_survives_json(prompts: int) -> None:
    before = summarize_acceptance(simulated(prompts, seed=14))
    values = json.loads(json.dumps(before.to_json()))
    assert AcceptanceSummary(**{**values, "histogram": tuple(values["histogram"])}) == before


def test_statistics_do_not_need_torch() -> None:
    code = "import sys, draftworks.evaluation.report.slices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unpaired_interval_holds_the_difference_and_is_wider_than_the_paired_one():
    """Prompts that are easy for both drafts cancel out only where they are resampled together."""
    rng = random.Random(3)
    ease = [rng.randint(0, 4) for _ in range(60)]
    better, worse = (
        [PromptAcceptance.from_accepted_counts(f"s{n}", [one + more] * 5, 5) for n, one in enumerate(ease)]
        for more in (1, 0)
    )
    paired, unpaired = compare_paired(better, worse), compare_unpaired(better, worse)
    assert unpaired is not None
    assert unpaired.interval.low < paired.difference < unpaired.interval.high
    assert width(unpaired.interval) > 2 * width(paired.interval)
    assert compare_unpaired(better, []) is None


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
