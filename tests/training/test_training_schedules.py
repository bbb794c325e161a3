"""Shapes of the learning-rate schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.training.optimizer import LrSchedule, ScheduleName


def rates(name: ScheduleName, total: int, steps: range | tuple[int, ...], **options: float) -> list[float]:
    schedule = LrSchedule(1.0, total, name, **options)
    return [round(schedule.lr(step), 4) for step in steps]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates("constant", 100, range(7), warmup_ratio=0.05) == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]


def test_golden_schedules() -> None:
    steps = (0, 1, 2, 4, 6, 10)
    assert rates("cosine", 10, steps, warmup_ratio=0.2) == [0.5, 1.0, 1.0, 0.8536, 0.5, 0.0]
    assert rates("linear", 10, steps, warmup_ratio=0.2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]
    assert rates("wsd", 10, range(11), warmup_ratio=0.2, decay_ratio=0.4) == [
        0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0,
    ]  # fmt: skip


def test_floor_is_where_a_decay_ends() -> None:
    for name in ("cosine", "linear", "wsd"):
        assert rates(name, 10, (10, 50), floor=0.1) == [0.1, 0.1]
    assert rates("linear", 10, (5,), warmup_ratio=0.0, floor=0.2) == [0.6]


def test_wsd_is_stable_until_its_decay_however_long_the_warm_up() -> None:
    assert rates("wsd", 10, range(8, 11), warmup_ratio=0.9, decay_ratio=0.5) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("peak", [1e-4, 3.0])
def test_peak_scales_everything(peak: float) -> None:
    assert LrSchedule(peak, 10).lr(5) == pytest.approx(peak * LrSchedule(1.0, 10).lr(5))


@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.integers(1, 500),
    st.floats(0, 0.9),
    st.floats(0.01, 1.0),
    st.floats(0, 1),
)
def test_rate_stays_positive_and_never_rises_after_warm_up(
    name: ScheduleName, total: int, warmup: float, decay: float, floor: float
) -> None:
    schedule = LrSchedule(1.0, total, name, warmup, decay, floor)
    values = [schedule.lr(step) for step in range(total)]
    after = values[int(warmup * total) :]
    assert all(0 < value <= 1 + 1e-9 for value in values)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after, after[1:]))
    assert schedule.lr(10 * total) == pytest.approx(1.0 if name == "constant" else floor)
