"""A charge is corrected to what its runs take: wall hours times ranks, whatever becomes of them."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import dagster as dg
import pytest
from decision_toys import HOUR, NOW, charged

from draftworks.decision.budget import Entry, Outcome
from sensors.acting import correct_by_runs


def record_of(run: dg.DagsterRun, begun: float | None, ended: float | None) -> dg.RunRecord:
    moment = datetime.fromtimestamp(NOW, UTC)
    return dg.RunRecord(1, run, moment, moment, begun, ended)


@pytest.mark.parametrize(
    ("status", "begun", "now", "expected"),
    [
        (dg.DagsterRunStatus.SUCCESS, NOW, NOW + HOUR, (2.0, Outcome.SUCCEEDED)),
        (dg.DagsterRunStatus.FAILURE, NOW, NOW + 3 * HOUR, (6.0, Outcome.FAILED)),
        (dg.DagsterRunStatus.CANCELED, None, NOW + HOUR, (0.0, Outcome.FAILED)),
        (dg.DagsterRunStatus.STARTING, None, NOW + 9 * HOUR, (4.0, Outcome.OPEN)),
        (dg.DagsterRunStatus.STARTED, NOW, NOW + HOUR, (4.0, Outcome.OPEN)),
        (dg.DagsterRunStatus.STARTED, NOW, NOW + 5 * HOUR, (11.0, Outcome.OPEN)),
    ],
)
def test_a_run_takes_its_wall_hours_times_its_ranks(
    status: dg.DagsterRunStatus, begun: float | None, now: float, expected: tuple[float, Outcome]
):
    run = dg.DagsterRun(job_name="retrain_eagle3", status=status)
    charge = charged("a", 4.0, NOW)
    ended = now if run.is_finished else None
    [found] = correct_by_runs(Entry(charge, 4.0, NOW), [record_of(run, begun, ended)], now)
    assert (pytest.approx(found.hours), found.outcome) == expected
    known = dataclasses.replace(Entry(charge, found.hours, NOW, found.outcome), run=run.run_id)
    assert correct_by_runs(known, [record_of(run, begun, ended)], now) == []


def test_a_run_that_is_executed_again_counts_with_the_first():
    first = dg.DagsterRun(job_name="retrain_eagle3", status=dg.DagsterRunStatus.FAILURE)
    entry = Entry(charged("a", 4.0, NOW), 2.0, NOW + HOUR, Outcome.FAILED, first.run_id)
    records = [record_of(first, NOW, NOW + HOUR)]
    assert correct_by_runs(entry, records, NOW + 9 * HOUR) == []
    for status, ended, hours in [
        (dg.DagsterRunStatus.STARTED, None, 2.0 + 4.0),
        (dg.DagsterRunStatus.SUCCESS, NOW + 3 * HOUR, 2.0 + 2.0),
    ]:
        second = dg.DagsterRun(job_name="retrain_eagle3", status=status)
        both = [*records, record_of(second, NOW + 2 * HOUR, ended)]
        [found] = correct_by_runs(entry, both, NOW + 3 * HOUR)
        assert found.hours == pytest.approx(hours)
        assert found.run == second.run_id
