"""Whether a job that did not end by itself is submitted again, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launcher_contract import play, wait_until, wait_until_up
from launcher_harnesses import ToyHarness

from resources.job_claims import JobClaim


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ToyHarness]:
    harness = ToyHarness(tmp_path)
    yield harness
    harness.clean_up()


def test_a_job_between_two_submissions_of_a_dead_run_is_taken_over(harness: ToyHarness):
    """Its claim names no job: it is nowhere else, and nobody but who waits for it will submit it."""

    def preempt() -> None:
        wait_until_up(harness)
        claim = JobClaim.read(harness.claim)
        assert claim is not None
        dead = replace(claim.owner, run_id="0" * 8, started=claim.owner.started - 1)
        replace(claim, owner=dead, job_id=None, files=claim.files.next_submission()).publish(harness.claim)
        harness.preempt()
        wait_until(lambda: harness.count_submitted() == 2)

    (job,) = play(harness, "steps", preempt).jobs
    assert job.metadata["submissions"] == harness.count_submitted() == 2


def test_a_job_that_is_cancelled_in_its_scheduler_by_hand_stays_cancelled(harness: ToyHarness):
    """An administrator had a reason; the next run goes on from what it has saved."""

    def cancel() -> None:
        wait_until_up(harness)
        (job,) = harness.scheduler.list()
        harness.scheduler.end(job.id, 30.0)

    played = play(harness, "steps", cancel)
    assert (len(played.jobs), len(played.failures), harness.count_submitted()) == (0, 1, 1)
