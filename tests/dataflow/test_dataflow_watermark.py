"""Watermarks: what they refuse, and what they let through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paused_time import PausedTime

from draftworks.dataflow.watermark import InFlight, Watermark, wait_for_room
from draftworks.errors import ConfigError, StoreError

LIMITS = st.one_of(st.none(), st.integers(1, 20))


@pytest.mark.parametrize("limits", [{"samples": 0}, {"bytes": -1}, {"steps": 0}, {"samples": None}])
def test_limits_that_mean_nothing_are_refused(limits):
    with pytest.raises(ConfigError, match="watermark"):
        Watermark(**limits)


def test_the_default_is_256_samples():
    assert Watermark() == Watermark(samples=256, bytes=None, steps=None)


@pytest.mark.parametrize(
    ("watermark", "batch", "name"),
    [
        (Watermark(samples=7), InFlight(8), "samples"),
        (Watermark(bytes=99), InFlight(1, 100), "bytes"),
        (Watermark(steps=1), InFlight(1, 1, 2), "steps"),
    ],
)
def test_a_watermark_below_one_batch_is_refused(watermark, batch, name):
    with pytest.raises(ConfigError, match=rf"watermark.{name}: expected at least one global batch"):
        watermark.require_batch(batch)


@given(
    samples=LIMITS, nbytes=LIMITS, in_flight=st.tuples(st.integers(0, 25), st.integers(0, 25)), piece=st.integers(0, 9)
)
def test_room_means_below_every_limit(samples, nbytes, in_flight, piece):
    if samples is None and nbytes is None:
        return
    watermark, before, more = Watermark(samples, nbytes), InFlight(*in_flight), InFlight(1, piece)
    found = watermark.has_room(before, more)
    assert found == (
        (samples is None or before.samples + 1 <= samples) and (nbytes is None or before.bytes + piece <= nbytes)
    )


def test_steps_are_counted_or_turned_into_samples():
    watermark = Watermark(samples=None, steps=3)
    assert watermark.has_room(InFlight(900, 0, 2), InFlight(1, 0, 1))
    assert not watermark.has_room(InFlight(0, 0, 3), InFlight(1, 0, 1))
    with pytest.raises(ValueError, match="for_batches_of"):
        watermark.has_room(InFlight(1), InFlight(1))
    assert watermark.for_batches_of(8) == Watermark(samples=24)
    assert Watermark(samples=20, bytes=5, steps=3).for_batches_of(8) == Watermark(20, 5)


def test_waiting_ends_by_room_by_stop_by_failure_and_by_time():
    more, full = InFlight(1), InFlight(4)
    watermark, levels = Watermark(samples=4), [full, full, InFlight(3)]

    def wait(read, **options) -> bool:
        return wait_for_room(watermark, read, more, timeout_s=0.2, describe_sides=lambda: "A; B", **options)

    assert wait(lambda: levels.pop(0))
    assert not wait(lambda: full, should_stop=lambda: True)
    with pytest.raises(StoreError, match="nothing was consumed for 0.2 s, with 4 samples.*A; B"):
        wait(lambda: full)
    with pytest.raises(OSError, match="gone"):
        wait(_raise_gone)
    with pytest.raises(StoreError, match="more than the watermark ever lets through"):
        wait_for_room(watermark, lambda: InFlight(), InFlight(5), timeout_s=9, describe_sides=str)


@pytest.fixture
def clock(monkeypatch) -> PausedTime:
    clock = PausedTime()
    monkeypatch.setattr("draftworks.dataflow.watermark.time", clock)
    return clock


def test_a_slow_consumer_is_waited_for_as_long_as_it_consumes_at_all(clock: PausedTime):
    """The limit is of the time in which nothing is consumed, not of the wait: one sample of five in 0.6 s of 1 s."""
    assert wait_for_room(
        Watermark(samples=4),
        lambda: InFlight(8 - int(clock.now / 0.6)),
        InFlight(1),
        timeout_s=1.0,
        describe_sides=str,
    )
    assert clock.now > 2


def test_a_consumer_that_stops_is_given_up_the_limit_after_what_it_consumed_last(clock: PausedTime):
    with pytest.raises(StoreError, match="nothing was consumed for 1 s, with 7 samples"):
        wait_for_room(
            Watermark(samples=4),
            lambda: InFlight(8 if clock.now < 0.6 else 7),
            InFlight(1),
            timeout_s=1.0,
            describe_sides=str,
        )
    assert 1.6 < clock.now < 1.8


def _raise_gone() -> InFlight:
    raise OSError("gone")
