"""Several jobs side by side, of a launcher that plays what happens to them: who is ended, and whose failure is shown."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from resources.companions import Companion
from resources.torch_job import JobState, JobStatus, TorchJob
from resources.torch_launcher import Outcome, PeerJob, TorchLauncher

FAILED, CANCELLED = JobStatus(JobState.FAILED, 1), JobStatus(JobState.CANCELLED)


@dataclass
class Play:
    """What a step saw: how its jobs ended, the failures as they were told, and what the step raised."""

    cancelled: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    told: dict[str, dg.Failure] = field(default_factory=dict)
    raised: BaseException | None = None


def make_launcher(seen: Play, at: Callable[[int], None], **options: Any) -> TorchLauncher:
    """Jobs are the names of their modules: `hang` runs until it is cancelled, `fail` ends with an error."""
    polls = itertools.count(1)

    class PlayedLauncher(TorchLauncher):
        def submit(self, job: TorchJob, env: Any, run_dir: Any) -> str:
            return job.module

        def poll(self, handle: str) -> JobStatus:
            at(next(polls))
            if handle in seen.cancelled:
                return CANCELLED
            return FAILED if handle.startswith("fail") else JobStatus(JobState.RUNNING)

        def cancel(self, handle: str) -> None:
            seen.cancelled.append(handle)

        def describe(self, handle: str) -> dict[str, str | int]:
            return {"engine": "played"}

    return PlayedLauncher(poll_interval_s=0.01, **options)


def play(
    tmp_path: Path,
    jobs: list[str],
    beside: str = "hang",
    at: Callable[[int], None] = lambda polls: None,
    **options: Any,
) -> Play:
    seen = Play()
    launcher = make_launcher(seen, at, workdir=str(tmp_path), **options)

    @dg.asset
    def drafts(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        peers = [PeerJob(name, TorchJob(name), tmp_path / name) for name in jobs]
        companions = [Companion(TorchJob(f"{beside}-beside"), tmp_path / "produce")]
        try:
            seen.outcomes.update(launcher.run_together(context, peers, companions, on_failure=seen.told.setdefault))
        except BaseException as error:
            seen.raised = error
        return dg.MaterializeResult()

    assert dg.materialize([drafts]).success
    return seen


def test_an_interrupt_ends_all_jobs_and_what_runs_beside_them(tmp_path: Path):
    def interrupt(polls: int) -> None:
        if polls == 5:
            raise KeyboardInterrupt

    seen = play(tmp_path, ["hang-1", "hang-2"], at=interrupt)
    assert isinstance(seen.raised, KeyboardInterrupt)
    assert sorted(seen.cancelled[:2]) == ["hang-1", "hang-2"]
    assert seen.cancelled[2:] == ["hang-beside"]


def test_a_failure_of_what_runs_beside_ends_all_jobs_and_is_the_cause(tmp_path: Path):
    seen = play(tmp_path, ["hang-1", "hang-2"], beside="fail")
    assert isinstance(seen.raised, dg.Failure)
    assert seen.raised.description.startswith("produce: ")
    assert sorted(seen.cancelled) == ["hang-1", "hang-2"]
    assert not seen.told


@pytest.mark.parametrize("limit", ["time_limit_s", "none"])
def test_a_job_that_fails_or_takes_too_long_ends_alone(tmp_path: Path, limit: str):
    if limit == "none":
        seen = play(tmp_path, ["fail-1", "fail-2"])
        assert seen.cancelled == ["hang-beside"]
    else:
        seen = play(tmp_path, ["hang-1", "fail-2"], time_limit_s=0.1)
        assert seen.cancelled == ["hang-1", "hang-beside"]
        assert "ran over its time limit" in seen.told["hang-1"].description
    assert seen.raised is None
    assert seen.outcomes == seen.told
