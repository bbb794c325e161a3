"""Work goes to the least busy server, not to failing ones, and within each server's limit.
A breaker opens after repeated failures, then allows one trial; the test controls the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import HANG_S

from draftworks.capture.answers.load_balancer import BreakerState, CircuitBreaker, LoadBalancer
from draftworks.errors import CaptureError, EngineError, PassingTroubleError


def make_balancer(*names: str, limit: int = 99, **options) -> LoadBalancer[str]:
    """A load balancer whose clients are the server names, and whose breakers never cool down."""
    return LoadBalancer(
        {name: name for name in names}, limit, lambda: CircuitBreaker(failures=2, cooldown_s=float("inf")), **options
    )


def make_work(*dead: str, log: list[str] | None = None) -> Callable[[str], str]:
    """Return work that returns the server's name, and fails on the `dead` ones."""

    def work(name: str) -> str:
        if log is not None:
            log.append(name)
        if name in dead:
            raise EngineError(f"{name} is gone")
        return name

    return work


def test_equal_servers_get_equal_shares():
    spread = make_balancer("a", "b", "c")
    done = [spread.run(make_work()) for _ in range(9)]
    assert {name: done.count(name) for name in "abc"} == {"a": 3, "b": 3, "c": 3}


def test_work_goes_where_the_least_is_outstanding():
    spread, go = make_balancer("a", "b"), threading.Event()
    started = threading.Semaphore(0)

    def long(name: str) -> str:
        started.release()
        go.wait(HANG_S)
        return name

    with ThreadPoolExecutor(3) as pool:
        busy = pool.submit(spread.run, long, 5)
        assert started.acquire(timeout=HANG_S)
        free = {spread.run(make_work()) for _ in range(4)}
        go.set()
        assert {busy.result()}.isdisjoint(free)
        assert len(free) == 1


def test_no_server_has_more_than_its_limit_and_all_is_done():
    spread, go = make_balancer("a", "b", limit=2), threading.Event()
    started = threading.Semaphore(0)
    inside: list[str] = []

    def work(name: str) -> str:
        inside.append(name)
        started.release()
        go.wait(HANG_S)
        return name

    with ThreadPoolExecutor(12) as pool:
        done = [pool.submit(spread.run, work) for _ in range(12)]
        assert all(started.acquire(timeout=HANG_S) for _ in range(4))
        assert not started.acquire(timeout=0.2)
        assert sorted(inside) == ["a", "a", "b", "b"]
        go.set()
        assert len([each.result() for each in done]) == 12


def test_more_than_the_limit_at_once_goes_to_a_server_that_has_nothing_else():
    assert make_balancer("a", limit=2).run(make_work(), requests=5) == "a"


def test_the_work_of_a_server_that_fails_is_done_by_another():
    spread = make_balancer("a", "b")
    assert [spread.run(make_work("a")) for _ in range(5)] == ["b"] * 5


def test_a_server_that_failed_often_enough_is_asked_no_more_and_that_is_told_once(caplog):
    opened, asked = [], []
    spread = make_balancer("a", "b", on_open=lambda client, error: opened.append((client, str(error))))
    for _ in range(8):
        spread.run(make_work("a", log=asked))
    assert asked.count("a") == 2
    assert opened == [("a", "a is gone")]
    assert [record.message for record in caplog.records] == ["a is gone", "a is gone\na gets no requests for now"]


def test_when_all_have_failed_the_last_error_of_each_is_told():
    with pytest.raises(EngineError, match=r"(?s)none of 2 servers is available:\n  a: a is gone\n  b: b is gone"):
        make_balancer("a", "b").run(make_work("a", "b"))


def test_no_server_is_asked_twice_for_the_same_work():
    asked: list[str] = []
    patient = LoadBalancer({"a": "a", "b": "b"}, 99, lambda: CircuitBreaker(failures=99))
    with pytest.raises(EngineError):
        patient.run(make_work("a", "b", log=asked))
    assert sorted(asked) == ["a", "b"]


def test_a_server_that_was_mended_gets_work_again():
    spread = make_balancer("a")
    for _ in range(2):
        with pytest.raises(EngineError):
            spread.run(make_work("a"))
    with pytest.raises(EngineError, match="none of 1 servers"):
        spread.run(make_work())
    spread.reopen("a")
    assert spread.run(make_work()) == "a"


def test_a_refused_request_is_not_given_to_another_and_says_nothing_against_the_server():
    spread, asked = make_balancer("a", "b"), []

    def refuse(name: str) -> str:
        asked.append(name)
        raise CaptureError("too long")

    for _ in range(6):
        with pytest.raises(CaptureError, match="too long"):
            spread.run(refuse)
    assert len(asked) == 6
    assert {each.breaker.state for each in spread.servers} == {BreakerState.CLOSED}


def test_those_who_meet_a_trial_wait_for_what_comes_of_it():
    now = [0.0]
    spread = LoadBalancer({"a": "a"}, 99, lambda: CircuitBreaker(failures=1, cooldown_s=1, clock=lambda: now[0]))
    with pytest.raises(EngineError):
        spread.run(make_work("a"))
    now[0] = 1.0
    begun, go = threading.Event(), threading.Event()

    def trial(name: str) -> str:
        begun.set()
        go.wait(HANG_S)
        return "trial"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(spread.run, trial)
        assert begun.wait(HANG_S)
        others = [pool.submit(spread.run, make_work()) for _ in range(3)]
        assert not any(other.done() for other in others)
        go.set()
        assert [first.result(), *(other.result() for other in others)] == ["trial", "a", "a", "a"]


def test_an_interruption_leaves_nothing_taken():
    spread = make_balancer("a", limit=1)

    def interrupted(name: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spread.run(interrupted)
    assert spread.run(make_work()) == "a"


def test_a_server_that_is_held_gets_no_work_and_no_trial_until_it_is_released():
    now = [0.0]
    spread = LoadBalancer(
        {"a": "a", "b": "b"}, 99, lambda: CircuitBreaker(failures=1, cooldown_s=1, clock=lambda: now[0])
    )
    spread.run(make_work("a"))
    spread.hold("a")
    now[0] = 9.0
    assert [spread.run(make_work()) for _ in range(4)] == ["b"] * 4
    with pytest.raises(EngineError, match="none of 2 servers"):
        spread.run(make_work("b"))
    spread.release("a")
    assert spread.run(make_work()) == "a"


def test_those_who_wait_for_room_at_a_server_that_is_held_are_told_that_none_is_left():
    spread, begun, go = make_balancer("a", limit=1), threading.Event(), threading.Event()

    def long(name: str) -> str:
        begun.set()
        go.wait(HANG_S)
        return name

    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(spread.run, long)
        assert begun.wait(HANG_S)
        waits = pool.submit(spread.run, make_work())
        spread.hold("a")
        try:
            with pytest.raises(EngineError, match="none of 1 servers"):
                waits.result()
        finally:
            go.set()
            spread.release("a")
        assert busy.result() == "a"


def test_a_far_server_is_asked_while_no_near_one_has_room():
    spread, go = make_balancer("near", "far", limit=2, far=["far"]), threading.Event()
    started = threading.Semaphore(0)

    def work(name: str) -> str:
        started.release()
        go.wait(HANG_S)
        return name

    assert [spread.run(make_work()) for _ in range(3)] == ["near"] * 3
    with ThreadPoolExecutor(3) as pool:
        busy = []
        for _ in range(3):
            busy.append(pool.submit(spread.run, work))
            assert started.acquire(timeout=HANG_S)
        go.set()
        assert [each.result() for each in busy] == ["near", "near", "far"]
    assert spread.run(make_work("near")) == "far"


def test_trouble_that_passes_stays_what_it_is_while_no_other_server_is_there():
    spread = make_balancer("a", "b")
    spread.hold("b")

    def work(name: str) -> str:
        raise PassingTroubleError(f"{name} is busy")

    with pytest.raises(PassingTroubleError, match="a is busy"):
        spread.run(work)


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
