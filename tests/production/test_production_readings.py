"""Windows between readings: restarts anywhere give no negative and no invented counts, and nothing seen is lost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.production.readings import Reading, split_windows, thin

START = {"passes": 0, "accepted": 0, "proposed": 0}


@dataclass(frozen=True)
class Life:
    """A server's life: its readings, and what truly happened between them.

    Attributes:
        truth: passes and accepted tokens in all, after the first reading.
        seen: as far as a later reading of the same process has them.
    """

    readings: list[Reading]
    truth: tuple[int, int]
    seen: tuple[int, int]


STEPS = st.lists(st.one_of(st.tuples(st.integers(0, 50), st.integers(0, 5)), st.sampled_from(["read", "restart"])))


def live(steps: list, named: bool) -> Life:
    """Replay a life: traffic as (passes, accepted of each), readings, restarts. `named`: processes can be told apart."""
    counters, process, now = dict(START), 0, 0.0
    readings: list[Reading] = []
    truth, seen, unread = [0, 0], [0, 0], [0, 0]
    for step in ["read", *steps, "read"]:
        now += 1.0
        if step == "read":
            name = f"process {process}" if named else None
            readings.append(Reading(now, name, "a", True, "1", dict(counters), None))
            seen = [seen[i] + unread[i] for i in range(2)]
            unread = [0, 0]
        elif step == "restart":
            counters, process, unread = dict(START), process + 1, [0, 0]
        else:
            passes, each = step
            for name, count in zip(START, (passes, passes * each, passes * 5)):
                counters[name] += count
            truth = [truth[0] + passes, truth[1] + passes * each]
            unread = [unread[0] + passes, unread[1] + passes * each]
    return Life(readings, (truth[0], truth[1]), (seen[0], seen[1]))


@given(STEPS, st.booleans())
def test_restarts_anywhere_give_no_negative_and_no_invented_counts(steps: list, named: bool):
    life = live(steps, named)
    windows = split_windows(life.readings)
    assert all(value >= 0 for window in windows for value in window.counts.values())
    assert sum(window.passes for window in windows) <= life.truth[0]
    assert sum(window.accepted for window in windows) <= life.truth[1]


@given(STEPS)
def test_where_processes_can_be_told_apart_all_that_a_reading_saw_is_counted_and_nothing_else(steps: list):
    life = live(steps, named=True)
    windows = split_windows(life.readings)
    assert (sum(each.passes for each in windows), sum(each.accepted for each in windows)) == life.seen


@given(STEPS.map(lambda steps: [step for step in steps if step != "restart"]), st.booleans())
def test_without_restarts_the_windows_sum_to_the_difference_of_the_last_and_the_first_reading(steps: list, named: bool):
    readings = live(steps, named).readings
    windows = split_windows(readings)
    assert not any(window.restarted for window in windows)
    total = readings[-1].counters["passes"] - readings[0].counters["passes"]
    assert sum(window.passes for window in windows) == total


@given(STEPS, st.integers(8, 40))
def test_a_series_that_is_thinned_has_the_same_sums(steps: list, most: int):
    readings = live(steps, named=True).readings
    kept = thin(readings, most)
    assert len(kept) <= max(most, 1)
    assert kept[-1] == readings[-1]
    restarts = sum(window.restarted for window in split_windows(readings))
    if 2 * restarts + 2 <= most // 2:  # else some edges have to go
        sums = [sum(window.accepted for window in split_windows(each)) for each in (readings, kept)]
        assert sums[0] == sums[1]


def reading(time: float, passes: int, tokens: int, requests: int, draft: str = "a") -> Reading:
    return Reading(time, None, draft, True, None, {"passes": passes, "tokens": tokens, "requests": requests}, None)


def test_a_server_without_a_counter_of_accepted_tokens_gave_one_token_per_request_and_one_per_pass_by_itself():
    [window] = split_windows([reading(0, 10, 100, 5), reading(1, 30, 100 + 20 + 3 + 44, 8)])
    assert (window.passes, window.accepted, window.draft) == (20, 44, "a")


def test_counts_over_a_change_of_the_draft_without_a_restart_are_nobodys():
    first, second = split_windows([reading(0, 1, 2, 1), reading(1, 2, 4, 1, "b"), reading(2, 3, 6, 1, "b")])
    assert (first.draft, second.draft) == (None, "b")
    [after] = split_windows([reading(0, 10, 20, 1), reading(1, 2, 4, 1, "b")])
    assert (after.restarted, after.draft, after.passes) == (True, "b", 2)


def test_a_reading_comes_back_as_it_was_and_another_value_is_refused():
    one = Reading(1.5, "seed 1", "a", False, "0.5.23", {"passes": 3}, 1.25)
    assert Reading.from_json(one.to_json()) == one
    for wrong in ({"time": "x"}, {"counters": {"passes": -1}}, {"counters": {"passes": 1.5}}, {"gauge": float("nan")}):
        with pytest.raises(StoreError, match="not a reading"):
            Reading.from_json({**one.to_json(), **wrong})
    with pytest.raises(StoreError, match="not a reading"):
        Reading.from_json({"time": 1.0})
