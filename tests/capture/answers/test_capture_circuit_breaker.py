"""A breaker opens after repeated failures, then allows one trial; the test controls the clock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from draftworks.capture.answers.load_balancer import BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failures=3, cooldown_s=10, clock=clock)


def opened(breaker: CircuitBreaker) -> CircuitBreaker:
    for _ in range(3):
        breaker.record_failure()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_at_the_last_of_so_many_failures_in_a_row(breaker):
    assert [breaker.record_failure() for _ in range(2)] == [False, False]
    assert breaker.allow()
    assert breaker.record_failure()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()


def test_a_success_between_failures_counts_from_the_beginning_again(breaker):
    for _ in range(5):
        breaker.record_failure()
        breaker.record_failure()
        breaker.record_success()
    assert breaker.state is BreakerState.CLOSED


def test_after_the_cool_down_one_request_alone_is_let_through(breaker, clock):
    opened(breaker)
    clock.now += 9.9
    assert not breaker.allow()
    clock.now += 0.1
    assert breaker.state is BreakerState.HALF_OPEN
    assert [breaker.allow() for _ in range(3)] == [True, False, False]


def test_many_threads_get_one_trial(breaker, clock):
    opened(breaker)
    clock.now += 10
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: breaker.allow(), range(64))) == 1


def test_a_trial_that_succeeds_closes_it(breaker, clock):
    opened(breaker)
    clock.now += 10
    breaker.allow()
    breaker.record_success()
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.record_failure() for _ in range(3)] == [False, False, True]


def test_a_trial_that_fails_opens_it_for_as_long_again(breaker, clock):
    opened(breaker)
    clock.now += 10
    breaker.allow()
    assert breaker.record_failure()
    clock.now += 9.9
    assert not breaker.allow()
    clock.now += 0.1
    assert breaker.allow()


def test_a_trial_of_unknown_end_leaves_the_place_to_another(breaker, clock):
    opened(breaker)
    clock.now += 10
    assert breaker.allow()
    assert not breaker.is_available
    breaker.record_abandoned()
    assert breaker.allow()


def test_failures_of_requests_that_were_on_their_way_do_not_prolong_the_cool_down(breaker, clock):
    opened(breaker)
    clock.now += 9
    assert not breaker.record_failure()
    clock.now += 1
    assert breaker.allow()


def test_a_breaker_that_no_failure_opens_is_refused():
    with pytest.raises(ValueError, match="expected 1 or more, found 0"):
        CircuitBreaker(failures=0)
