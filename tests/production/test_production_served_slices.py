"""A slice that really fell is named first, from log lines alone; other drafts, weights and hours are not mixed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from request_logs import BEGIN, HOUR_S, make_request, make_traffic, write_log

from draftworks.config.observation import ObservationSpec, RequestsSpec
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Interval, Resampling
from draftworks.production import served_slices
from draftworks.production.request_log import OTHER_DRAFT, OTHER_WEIGHTS, RequestLog, RequestTable, ServedBy
from draftworks.production.requests import ServedRequest
from draftworks.production.served_slices import ServedSlice, ServedStanding, assess_requests

HOURS = ObservationSpec(baseline_hours=24, recent_hours=24)
QUICK = Resampling(resamples=500)


def load(folder: Path, requests: Iterable[ServedRequest]) -> RequestTable:
    write_log(folder / "log.jsonl", requests)
    log = RequestLog(
        RequestsSpec(files=["log.jsonl"]),
        folder,
        ("models/small",),
        lambda request: ServedBy("eagle3", request.draft or "d"),
        lambda: BEGIN + 1000 * HOUR_S,
    )
    return log.read().requests["eagle3"]


def assess(folder: Path, requests: Iterable[ServedRequest], hours: ObservationSpec = HOURS) -> ServedStanding:
    return assess_requests("eagle3", load(folder, requests), hours, resampling=QUICK)


CHANCES = {"chat": (0.5, 0.5), "docs": (0.3, 0.3), "tutor": (0.6, 0.4)}


@pytest.mark.parametrize("seed", range(3))
def test_the_slice_that_fell_is_named_first_and_those_that_did_not_are_not_named(tmp_path: Path, seed: int):
    found = assess(tmp_path, make_traffic(CHANCES, seed=seed))
    assert found.slices[0].verdict == "fell"  # all requests: a third of them accept less
    fallen = [each.name for each in found.fallen]
    assert fallen[0] == "source tutor"
    assert set(fallen) <= {"source tutor", "language de", "language en"}  # these hold a third of it each
    tutor = found.fallen[0]
    assert (tutor.now is not None, tutor.first is not None, tutor.change is not None) == (True, True, True)
    assert tutor.change is not None
    assert tutor.change.interval.low < -0.6 < tutor.change.interval.high


def test_what_a_slice_lost_for_certain_is_the_nearer_end_of_its_interval():
    lost = AcceptanceDifference(1.0, 1.5, Interval(-0.9, -0.1, 0.95), 0.01, 30)
    assert ServedSlice("source", "a", None, change=lost).certain_loss == 0.1
    assert ServedSlice("source", "a", None).certain_loss == 0.0


def test_where_nothing_changed_nothing_is_named(tmp_path: Path):
    named = [
        len(assess(tmp_path, make_traffic({"chat": (0.5, 0.5), "docs": (0.3, 0.3)}, each=5, seed=seed)).fallen)
        for seed in range(8)
    ]
    assert sum(map(bool, named)) <= 1  # 5% of the looks, by Holm


def test_an_application_that_is_new_is_compared_with_what_users_had(tmp_path: Path):
    requests = make_traffic({"chat": (0.5, 0.5), "docs": (0.5, 0.5), "new": (0.2, 0.2)})
    new = [one for one in requests if one.source != "new" or one.time > BEGIN + 30 * HOUR_S]
    [first, *_] = assess(tmp_path, new).fallen
    assert (first.name, first.compared, first.first) == ("source new", "with all", None)


def test_as_long_as_the_first_hours_last_there_is_no_verdict(tmp_path: Path):
    found = assess(tmp_path, make_traffic(CHANCES, hours=20))
    assert not found.baseline_over
    assert {each.verdict for each in found.slices} == {"too few requests"}
    assert {each.change for each in found.slices} == {None}
    assert all(each.now is not None and each.first is None for each in found.slices)


def test_the_last_hours_share_no_request_with_the_first_ones(tmp_path: Path):
    found = assess(tmp_path, make_traffic(CHANCES, hours=30, each=4))
    whole = found.slices[0]
    assert whole.now is not None
    assert whole.first is not None
    assert whole.first.count + whole.now.count == 30 * 12


def test_few_requests_have_a_value_and_no_interval_or_verdict(tmp_path: Path):
    requests = [make_request(n, time=BEGIN + n * HOUR_S, source="ab"[n % 2]) for n in range(38)]
    found = {each.name: each for each in assess(tmp_path, requests).slices}
    one = found["source a"].now
    assert one is not None
    assert (one.value, one.interval, one.count) == (0.5, None, 6)
    assert (found["source a"].change, found["source a"].verdict) == (None, "too few requests")


def test_a_former_draft_and_former_weights_are_counted_apart(tmp_path: Path):
    requests = [
        make_request(1, draft="old"),
        make_request(2, draft="new", weight_version="1"),
        make_request(3, draft="new", server="other", weight_version="1"),
        make_request(4, draft="new", weight_version="2"),
        make_request(5, draft="new", weight_version="2", accepted=7, completion_tokens=18),
    ]
    found = assess(tmp_path, requests)
    assert (found.draft, dict(found.apart)) == ("new", {OTHER_DRAFT: 1, OTHER_WEIGHTS: 1})
    whole = found.slices[0].now
    assert whole is not None
    assert (whole.count, whole.value) == (3, 17 / 30)
    assert (found.since, found.until) == (BEGIN + 3, BEGIN + 5)


def test_tokens_beyond_an_answers_end_are_not_counted(tmp_path: Path):
    found = assess(tmp_path, [make_request(1, passes=4, accepted=9, completion_tokens=10)]).slices[0].now
    assert found is not None
    assert found.value == 6 / 4  # 1 + 4 + 9 is 4 more than 10; the first of these is the target's own


def test_groups_of_many_requests_give_the_same_value_and_much_the_same_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table = load(tmp_path, make_traffic(CHANCES))
    grouped = assess_requests("eagle3", table, HOURS, resampling=QUICK).slices[0].change
    monkeypatch.setattr(served_slices, "MOST_GROUPS", 10**9)
    alone = assess_requests("eagle3", table, HOURS, resampling=QUICK).slices[0].change
    assert grouped is not None
    assert alone is not None
    assert np.isclose(grouped.difference, alone.difference)
    widths = [one.interval.high - one.interval.low for one in (grouped, alone)]
    assert np.isclose(widths[0], widths[1], rtol=0.15)


def test_figures_say_how_deep_servers_propose_and_how_much_is_sampled(tmp_path: Path):
    temperatures = [0.0, 0.0, 0.7, None]
    requests = [make_request(n, temperature=t, drafted=30) for n, t in enumerate(temperatures)]
    found = assess(tmp_path, [*requests[:3], replace(requests[3], drafted=None)])
    assert (found.proposed, found.sampled) == (3.0, 0.5)
