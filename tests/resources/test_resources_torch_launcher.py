"""Several jobs side by side, of a launcher that plays what happens to them: who is ended, and whose failure is shown.
Command lines, counts and folders of jobs, without running one.
Copies of a job that have died: killed ones start again, an error of the program ends all.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from draftworks.config.capture import CaptureSpec, SGLangSpec
from draftworks.config.data import EndpointSpec, ResponseSpec
from draftworks.config.run_files import CaptureRun, RegenerateRun, TrainRun
from draftworks.errors import ConfigError
from draftworks.programs.failure import RankFailure
from resources.companions import Companion
from resources.scheduler import DeadCopy, SeenJob
from resources.scheduler_launcher import MAX_KILLS, CopyVerdict, CopyWatch
from resources.torch_job import ONE_NODE, JobState, JobStatus, RunDir, TorchJob
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
    def drafts(context) -> dg.MaterializeResult:
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


def test_command_is_torchruns_with_a_rendezvous_of_its_own() -> None:
    command = TorchJob("draftworks.programs.train", ("run.yaml",), procs_per_node=2).build_command("--log-dir=x")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *ONE_NODE, "--log-dir=x", "--nproc-per-node=2"]
    assert command == [*torchrun, "-m", "draftworks.programs.train", "run.yaml"]


def test_another_python_runs_torchrun_and_with_it_every_rank() -> None:
    assert TorchJob("m", python=Path("/other/python")).build_command()[:3] == [
        "/other/python",
        "-m",
        "torch.distributed.run",
    ]


def test_command_takes_the_rendezvous_of_a_cluster() -> None:
    command = TorchJob("m", nodes=2).build_command("--nnodes=2", "--rdzv-endpoint=host:1")
    assert not set(ONE_NODE) & set(command)


@pytest.mark.parametrize("counts", [{"nodes": 0}, {"procs_per_node": 0}, {"gpus_per_node": -1}])
def test_impossible_counts_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TorchJob("m", **counts)


def test_every_attempt_has_a_folder_of_its_own(tmp_path: Path) -> None:
    attempts = [RunDir.create(tmp_path, "0123456789", retry).path for retry in (0, 0, 1)]
    assert [path.name for path in attempts] == ["01234567-retry0", "01234567-retry0-2", "01234567-retry1"]


def test_launchers_import_no_torch() -> None:
    code = "import resources.local_launcher, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_program_may_wait_as_long_as_what_it_asks_may_take() -> None:
    sglang = SGLangSpec(start_timeout_s=7, request_timeout_s=8)
    endpoint = EndpointSpec.model_construct(timeout_s=9)
    responses = ResponseSpec.model_construct(endpoint=endpoint)
    capture = CaptureSpec(backend="sglang")
    assert RegenerateRun.model_construct(capture=capture, sglang=sglang, responses=responses).longest_wait_s == 9
    assert CaptureRun.model_construct(capture=capture, sglang=sglang).longest_wait_s == 8
    assert CaptureRun.model_construct(capture=CaptureSpec(backend="hf"), sglang=sglang).longest_wait_s == 0
    assert TrainRun.model_construct().longest_wait_s == 0


def see(*dead: DeadCopy) -> SeenJob:
    return SeenJob("7", "dw-1", JobState.RUNNING, dead=dead)


def leave_error(files: RunDir, copy: int, error: BaseException) -> None:
    path = files.of_copy(copy).ranks / "none" / "attempt_0" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(RankFailure.of(error, rank=0).to_json()))


def test_a_killed_copy_starts_again_once_for_each_death(tmp_path: Path):
    now = [0.0]
    watch, files, first = CopyWatch(10.0, clock=lambda: now[0]), RunDir(tmp_path), DeadCopy(2, "0")
    assert watch.judge(see(first), files) == CopyVerdict(is_open=True), "its error may not be seen yet"
    now[0] = 11.0
    assert watch.judge(see(first), files) == CopyVerdict((2,))
    assert watch.judge(see(first), files) == CopyVerdict()
    assert watch.judge(see(DeadCopy(2, "1", lost=True)), files) == CopyVerdict((2,))


def test_a_copy_that_is_killed_too_often_fails_the_job(tmp_path: Path):
    watch, files = CopyWatch(0.0), RunDir(tmp_path)
    for life in range(MAX_KILLS):
        assert watch.judge(see(DeadCopy(0, str(life))), files).restart == (0,)
    assert watch.judge(see(DeadCopy(1, "0")), files).restart == (1,), "each counts for itself"
    verdict = watch.judge(see(DeadCopy(0, "last")), files)
    assert verdict.failure == f"copy 0 was killed {MAX_KILLS} times, its log is {files.of_copy(0).log}"


@pytest.mark.parametrize(
    ("error", "lost", "fails"),
    [
        (ValueError("v"), False, True),
        (ConfigError("c"), False, True),
        (ConfigError("c"), True, True),
        (ValueError("peers are gone"), True, False),
        (KeyboardInterrupt("saved"), False, False),
    ],
    ids=["error", "user", "user-lost", "lost", "interrupted"],
)
def test_what_its_ranks_left_decides(error: BaseException, lost: bool, fails: bool, tmp_path: Path):
    files = RunDir(tmp_path)
    leave_error(files, 3, error)
    verdict = CopyWatch(10.0).judge(see(DeadCopy(3, "0", lost)), files)
    assert bool(verdict.failure) == fails
    assert verdict.restart == (() if fails else (3,))


def test_another_copys_error_is_not_its_own(tmp_path: Path):
    files = RunDir(tmp_path)
    leave_error(files, 1, ValueError("v"))
    assert CopyWatch(0.0).judge(see(DeadCopy(0, "0")), files).restart == (0,)
