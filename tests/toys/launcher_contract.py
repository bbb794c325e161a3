"""What every launcher promises: a subclass gives the fixture `harness`, and is asked according to its traits."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import waiting
from contract_worker import FAILURE
from waiting import wait_until

from draftworks.config.launchers import parse_launcher
from resources.job_claims import JobClaim
from resources.job_messages import Bookmark
from resources.torch_job import JobIdentity, TorchJob
from resources.torch_launcher import JobResult, TorchLauncher

TOYS = Path(__file__).parent


@dataclass
class LauncherHarness(ABC):
    """One kind of launcher, with all that its jobs touch below `folder`.

    Attributes:
        survives: its jobs live on when the process that submitted them dies; they can be pre-empted.
        time_limit_s: the shortest time limit that it can keep.
        grace_s: seconds between terminate and kill of a cancelled job.
        stall_limit_s: seconds after which a stuck job is ended.
    """

    folder: Path
    survives = False
    time_limit_s = 2.0
    grace_s = 5.0
    stall_limit_s = 3.0

    @property
    def work(self) -> Path:
        """Folder that test and ranks share."""
        path = self.folder / "work"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def claim(self) -> Path:
        return self.folder / "out" / "job.json"

    @abstractmethod
    def make_launcher(self, **keys: Any) -> TorchLauncher:
        """Return a launcher with some keys of its settings, such as `stall_limit_s`."""

    @abstractmethod
    def make_settings(self, **keys: Any) -> dict[str, Any]:
        """Return these settings, as a deployment has them."""

    @abstractmethod
    def list_left(self) -> list[str]:
        """Return what jobs have left behind: processes, or jobs of the scheduler that have not ended."""

    def count_submitted(self) -> int:
        """Return the number of jobs that the scheduler was given, of a launcher that `survives`."""
        raise NotImplementedError

    def preempt(self) -> None:
        """End the running job as the scheduler does for a more important one, of a launcher that `survives`."""
        raise NotImplementedError

    @abstractmethod
    def clean_up(self) -> None:
        """End whatever a failed test has left."""


def make_job(harness: LauncherHarness, task: str, **keys: Any) -> TorchJob:
    """Return the job of a contract worker; it has the same identity whoever starts it."""
    name = hashlib.sha256(str(harness.folder).encode()).hexdigest()[:16]
    return TorchJob(
        "contract_worker",
        (task, str(harness.work)),
        procs_per_node=2,
        env={"PYTHONPATH": os.pathsep.join([str(TOYS), str(TOYS.parents[1])])},
        launcher=parse_launcher(harness.make_settings(**keys), "launcher"),
        identity=JobIdentity(f"dw-{name}", harness.claim, "t/draft", (harness.work / "checkpoints",)),
    )


@dataclass
class Played:
    """What came of an asset that ran a job."""

    jobs: list[JobResult] = field(default_factory=list)
    failures: list[dg.Failure] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def steps(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("step ")]


def play(
    harness: LauncherHarness,
    task: str,
    meanwhile: Callable[[], None] | None = lambda: None,
    tries: int = 1,
    **keys: Any,
) -> Played:
    """Run a job in an asset of this process; `meanwhile` runs in a thread, and its end lets the job finish, if given."""
    played = Played()

    def act() -> None:
        if meanwhile is not None:
            try:
                meanwhile()
            finally:
                (harness.work / "finish").touch()

    @dg.asset
    def draft(context) -> dg.MaterializeResult:
        launcher = harness.make_launcher(**keys)
        for _ in range(tries):
            try:
                played.jobs.append(
                    launcher.run(context, make_job(harness, task, **keys), run_dir=harness.folder / "runs")
                )
                break
            except dg.Failure as failure:
                played.failures.append(failure)
        return dg.MaterializeResult()

    with waiting.meanwhile(act), dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([draft], instance=instance)
        played.lines = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return played


def wait_until_up(harness: LauncherHarness) -> None:
    """Wait until both ranks are at work, and no longer say that they were."""
    ups = [harness.work / f"up.{rank}" for rank in (0, 1)]
    wait_until(lambda: all(up.exists() for up in ups), lambda: f"both ranks in {harness.work}")
    for up in ups:
        up.unlink()


def wait_until_shown(harness: LauncherHarness, words: str) -> None:
    """Wait until a Dagster process has noted that it passed a message on: what it has not noted, its successor shows again."""

    def is_noted() -> bool:
        for messages in (harness.folder / "runs").rglob("messages.jsonl"):
            before, found, _ = messages.read_bytes().partition(words.encode())
            if found and Bookmark(messages.with_name("messages.shown")).read() > len(before):
                return True
        return False

    wait_until(is_noted, f"that {words!r} is shown")


@contextmanager
def host(harness: LauncherHarness, task: str, **keys: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A Dagster process of its own that waits for the job."""
    kind = type(harness)
    command = [sys.executable, str(TOYS / "contract_host.py"), f"{kind.__module__}:{kind.__qualname__}"]
    path = os.pathsep.join([str(TOYS), str(TOYS.parents[1])])
    with (harness.folder / "host.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, str(harness.folder), task, json.dumps(keys)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class LauncherContract:
    """Promises of all launchers."""

    @pytest.fixture(autouse=True)
    def _clean_up(self, harness: LauncherHarness) -> Iterator[None]:
        yield
        harness.clean_up()

    def test_report_messages_and_log_arrive_and_nothing_is_left(
        self, harness: LauncherHarness, capfd: pytest.CaptureFixture[str]
    ):
        played = play(harness, "steps", lambda: wait_until_up(harness))
        (job,) = played.jobs
        assert job.report == {"task": "steps", "steps": max(played.steps())}
        assert played.steps() == list(range(1, job.report["steps"] + 1))
        page = capfd.readouterr().out
        assert all(f"rank {rank} speaks" in page for rank in (0, 1))
        self.expect_nothing_left(harness)

    def test_a_failing_rank_is_heard_in_its_own_words(self, harness: LauncherHarness):
        (failure,) = play(harness, "fail").failures
        assert failure.description.startswith(f"rank 1: RuntimeError: {FAILURE}")
        assert failure.allow_retries
        self.expect_nothing_left(harness)

    def test_a_retry_is_a_new_job_with_files_of_its_own(self, harness: LauncherHarness):
        played = play(harness, "die", tries=2)
        assert len(played.failures) == len(played.jobs) == 1
        assert "no rank left an error message" in played.failures[0].description
        assert len(list((harness.folder / "runs").iterdir())) == 2
        self.expect_nothing_left(harness)

    def test_a_cancelled_job_has_time_to_save_and_is_gone(self, harness: LauncherHarness):
        with host(harness, "steps", grace_s=30) as dagster:
            wait_until_up(harness)
            dagster.send_signal(signal.SIGINT)
            assert dagster.wait() != 0
        assert list((harness.work / "checkpoints").iterdir())
        self.expect_nothing_left(harness)

    def test_a_stuck_job_is_ended(self, harness: LauncherHarness):
        (failure,) = play(harness, "stuck", stall_limit_s=harness.stall_limit_s, grace_s=1).failures
        assert "made no progress" in failure.description
        self.expect_nothing_left(harness)

    def test_a_time_limit_ends_a_job_or_submits_it_again(self, harness: LauncherHarness):
        def wait_for_the_second() -> None:
            checkpoints = harness.work / "checkpoints"
            wait_until(lambda: checkpoints.exists() and bool(list(checkpoints.iterdir())))
            wait_until_up(harness)
            wait_until_up(harness)

        meanwhile = wait_for_the_second if harness.survives else None
        played = play(harness, "steps", meanwhile, time_limit_s=harness.time_limit_s)
        if harness.survives:
            (job,) = played.jobs
            assert job.metadata["submissions"] >= 2
            begins = [line for line in played.lines if line.startswith("begins at step")]
            assert 2 <= len(begins) <= job.metadata["submissions"], (
                "on a busy machine one may not get as far as its program"
            )
            assert begins[0] == "begins at step 0" != begins[-1]
        else:
            assert "over its time limit" in played.failures[0].description
            assert not played.failures[0].allow_retries
        self.expect_nothing_left(harness)

    def test_the_death_of_dagster_leaves_what_it_should(self, harness: LauncherHarness):
        with host(harness, "steps") as dagster:
            wait_until_up(harness)
            if harness.survives:
                wait_until_shown(harness, "begins at step")
            dagster.kill()
            dagster.wait()
            if not harness.survives:
                wait_until(lambda: not harness.list_left(), lambda: f"the end of {harness.list_left()}")
                return
        wait_until_up(harness)
        before = harness.claim.read_text()
        played = play(harness, "steps", lambda: wait_until(lambda: harness.claim.read_text() != before))
        (job,) = played.jobs
        assert harness.count_submitted() == 1
        assert played.steps() == sorted(set(played.steps()))
        assert job.report["steps"] == max(played.steps()) >= len(played.steps())
        assert not any(line.startswith("begins at step") for line in played.lines), "told to the run that died"
        self.expect_nothing_left(harness)

    def expect_nothing_left(self, harness: LauncherHarness) -> None:
        wait_until(lambda: not harness.list_left(), lambda: f"the end of {harness.list_left()}")
        assert not harness.claim.exists()
        assert not list(harness.folder.rglob("*.tmp"))


IN_GATE = (
    "test_report_messages_and_log_arrive_and_nothing_is_left",
    "test_a_cancelled_job_has_time_to_save_and_is_gone",
    "test_a_pre_empted_job_is_submitted_again_and_goes_on",
    "test_the_death_of_dagster_leaves_what_it_should",
)
"""Of a real scheduler: the others are the launcher's part, which the toy scheduler is asked in full."""


class SchedulerContract(LauncherContract):
    """Promises of launchers whose jobs live in a scheduler."""

    def test_a_pre_empted_job_is_submitted_again_and_goes_on(self, harness: LauncherHarness):
        def preempt() -> None:
            wait_until_up(harness)
            harness.preempt()
            checkpoints = harness.work / "checkpoints"
            wait_until(lambda: checkpoints.exists() and bool(list(checkpoints.iterdir())))
            for up in harness.work.glob("up.*"):
                up.unlink()  # of the job that was pre-empted: rank 0 writes no other once it has saved
            wait_until_up(harness)

        played = play(harness, "steps", preempt)
        (job,) = played.jobs
        assert job.metadata["submissions"] == harness.count_submitted() == 2
        (checkpoint,) = (harness.work / "checkpoints").iterdir()
        assert f"begins at step {checkpoint.name}" in played.lines
        assert job.report["steps"] > int(checkpoint.name)
        self.expect_nothing_left(harness)

    def test_started_twice_it_is_one_job_whose_report_both_get(self, harness: LauncherHarness):
        owners = set()

        def have_both_claimed() -> bool:
            claim = JobClaim.read(harness.claim)
            owners.update([] if claim is None or claim.job_id is None else [claim.owner.pid])
            return len(owners) == 2

        with host(harness, "steps") as other:
            played = play(harness, "steps", lambda: wait_until(have_both_claimed))
            assert other.wait() == 0, (harness.folder / "host.log").read_text()
        (outcome,) = harness.folder.glob("outcome.*")
        assert json.loads(outcome.read_text()) == played.jobs[0].report
        assert harness.count_submitted() == 1
        self.expect_nothing_left(harness)
