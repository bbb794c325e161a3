"""Accepted tokens per pass over windows: the ratio of the sums, with an interval that has the true value as often as said."""

from __future__ import annotations

import numpy as np
import pytest

from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.production.readings import (
    LEAST_WINDOWS,
    MOST_WINDOWS,
    Window,
    compare_acceptance,
    estimate_acceptance,
)

FAST = Resampling(resamples=400)


def make_windows(accepted: np.ndarray, passes: np.ndarray) -> list[Window]:
    return [
        Window(float(n), n + 1.0, "a", {"passes": int(p), "accepted": int(a), "proposed": int(p) * 5}, False)
        for n, (a, p) in enumerate(zip(accepted, passes))
    ]


def draw_windows(rng: np.random.Generator, mean: float, count: int = 150, memory: float = 0.6) -> list[Window]:
    """Windows of traffic whose acceptance drifts: neighbours resemble each other."""
    noise = rng.normal(0, 0.3, count)
    drift = np.zeros(count)
    for n in range(1, count):
        drift[n] = memory * drift[n - 1] + noise[n]
    passes = rng.integers(20, 200, count)
    return make_windows(np.round(passes * np.clip(mean + drift, 0, 5)), passes)


def test_the_value_is_the_ratio_of_the_sums_and_lies_in_the_interval():
    windows = draw_windows(np.random.default_rng(0), 2.0)
    found = estimate_acceptance(windows, FAST)
    assert found.value == sum(w.accepted for w in windows) / sum(w.passes for w in windows)
    assert found.interval is not None
    assert found.interval.low < found.value < found.interval.high
    assert estimate_acceptance(windows, FAST) == found


def test_the_interval_has_the_true_value_about_as_often_as_it_says():
    """Windows one by one would have it in 60% of the cases: they resemble each other."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(120):
        interval = estimate_acceptance(draw_windows(rng, 2.0), FAST).interval
        assert interval is not None
        hits += interval.low <= 2.0 <= interval.high
    assert 0.8 <= hits / 120 <= 1.0


def test_a_difference_is_found_where_there_is_one_and_not_where_there_is_none():
    rng = np.random.default_rng(2)
    before, same, worse = (draw_windows(rng, mean) for mean in (2.0, 2.0, 1.5))
    equal, lower = compare_acceptance(same, before, FAST), compare_acceptance(worse, before, FAST)
    assert equal is not None
    assert equal.interval is not None
    assert equal.interval.low < 0 < equal.interval.high
    assert lower is not None
    assert lower.interval is not None
    assert lower.interval.high < 0
    assert lower.value == pytest.approx(-0.5, abs=0.2)


def test_few_windows_have_a_value_and_no_interval_and_windows_without_a_pass_are_none():
    ones = np.ones(LEAST_WINDOWS, dtype=int)
    few = estimate_acceptance(make_windows(ones[1:], ones[1:]), FAST)
    assert (few.value, few.interval, few.windows) == (1.0, None, LEAST_WINDOWS - 1)
    with_idle = [*make_windows(ones[1:], ones[1:]), *make_windows(0 * ones, 0 * ones)]
    assert estimate_acceptance(with_idle, FAST).interval is None
    idle = estimate_acceptance(make_windows(0 * ones, 0 * ones), FAST)
    assert (idle.value, idle.interval, idle.windows) == (None, None, 0)
    assert compare_acceptance(make_windows(ones, ones), make_windows(0 * ones, 0 * ones), FAST) is None
    only_value = compare_acceptance(make_windows(ones, ones), make_windows(ones[1:], ones[1:]), FAST)
    assert only_value is not None
    assert (only_value.value, only_value.interval) == (0.0, None)


def test_many_windows_are_joined_and_no_count_is_lost():
    count = MOST_WINDOWS * 7 + 3
    rng = np.random.default_rng(3)
    passes = rng.integers(1, 9, count)
    found = estimate_acceptance(make_windows(passes * 2, passes), FAST)
    assert (found.passes, found.accepted, found.windows) == (passes.sum(), passes.sum() * 2, count)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (2.0, 2.0)
