"""Jobs under a real torchrun: their reports and errors, and that no process of them is left.

What all launchers promise is asked in test_resources_launcher_contract.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml
from processes import wait_until_ended
from waiting import find_now, meanwhile, wait_until

from draftworks.errors import ConfigError
from draftworks.programs.failure import LESS_MEMORY
from draftworks.programs.heartbeat import HeartbeatRecord
from resources.local_launcher import LocalLauncher
from resources.torch_job import RunDir, TorchJob
from resources.torch_launcher import JobResult, PeerJob

HERE = Path(__file__).parent
PATH = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "programs")])}


@dataclass
class Outcome:
    """The outcome of one asset that ran a job."""

    result: dg.ExecuteInProcessResult
    jobs: list[JobResult]

    @property
    def failures(self) -> list[dg.DagsterEvent]:
        kinds = (dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.STEP_UP_FOR_RETRY)
        return [event for event in self.result.all_events if event.event_type in kinds]

    @property
    def failure(self) -> dg.Failure:
        (event,) = self.failures
        data = event.step_failure_data.user_failure_data
        return dg.Failure(data.description, data.metadata)


def launch(
    job: TorchJob, tmp_path: Path, *, retries: int = 0, clock: Callable[[], float] | None = None, **options: float
) -> Outcome:
    """Materialize an asset that runs the job and would be retried `retries` times; `clock` is that of the limits."""
    jobs: list[JobResult] = []
    launcher = LocalLauncher(workdir=str(tmp_path / "runs"), poll_interval_s=0.05, **options)
    launcher._clock = clock or launcher._clock

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=retries) if retries else None)
    def draft(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        jobs.append(launcher.run(context, job))
        return dg.MaterializeResult(metadata=jobs[-1].metadata)

    result = dg.materialize([draft], raise_on_error=False)
    return Outcome(result, jobs)


def worker(task: str, tmp_path: Path, *rest: str, procs: int = 2) -> TorchJob:
    args = (task, str(tmp_path / "marker"), *rest)
    return TorchJob("launcher_worker", args, procs_per_node=procs, env=PATH)


def framed(task: str, tmp_path: Path) -> TorchJob:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"out": ".", "task": task, "ranks": 2}))
    return TorchJob("frame_program", (str(tmp_path / "run.yaml"),), procs_per_node=2, env=PATH)


def survivors(tmp_path: Path) -> list[psutil.Process]:
    """Return the living processes with this test's marker among their arguments, without the Dagster process."""
    marker, found = str(tmp_path / "marker"), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if marker in arguments and not any(a.endswith("launcher_host.py") for a in arguments):
                found.append(process)
    return found


@contextmanager
def hanging_job(task: str, tmp_path: Path, grace_s: float, procs: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """A Dagster process of its own whose job's ranks hang."""
    command = [sys.executable, str(HERE / "launcher_host.py"), task, str(tmp_path / "marker"), str(tmp_path / "runs")]
    command += [str(grace_s), str(procs)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    host = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    markers = [tmp_path / f"marker.{rank}" for rank in range(procs)]
    try:
        wait_until(
            lambda: all(marker.exists() for marker in markers), "the job's ranks", possible=lambda: host.poll() is None
        )
        yield host
    finally:
        host.kill()
        host.wait()
        for process in survivors(tmp_path):
            process.kill()


def test_report_and_logs_of_all_ranks_arrive(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = launch(framed("sum", tmp_path), tmp_path)
    assert outcome.result.success
    (job,) = outcome.jobs
    assert job.report == {"sum": 1, "ranks": 2, "out": str(tmp_path)}
    assert job.metadata["engine"] == "local"
    assert job.metadata["seconds"] > 0
    log, page = Path(job.metadata["log"].path).read_text(), capfd.readouterr().out
    for rank in (0, 1):
        assert f"[rank {rank}] task sum" in log
        assert f"[rank {rank}] task sum" in page


def test_threads_are_given_to_each_rank(tmp_path: Path) -> None:
    (job,) = launch(worker("report", tmp_path, "1", procs=1), tmp_path, threads=3).jobs
    assert job.report == {"number": 0, "threads": "3"}


@pytest.mark.parametrize(("reports", "found"), [(0, "without a report"), (2, "after 2 reports")])
def test_success_without_exactly_one_report_fails(reports: int, found: str, tmp_path: Path) -> None:
    outcome = launch(worker("report", tmp_path, str(reports), procs=1), tmp_path, retries=1)
    assert f"launcher_worker exited 0 {found}" in outcome.failure.description
    assert not outcome.result.asset_materializations_for_node("draft")


def test_first_failed_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    failure = launch(framed("crash", tmp_path), tmp_path).failure
    assert failure.description.startswith("rank 1: RuntimeError: a ghost in the machine")
    assert 'raise RuntimeError("a ghost in the machine")' in failure.description
    assert failure.metadata["exit_code"].value == 1
    assert "a ghost" in Path(failure.metadata["log"].path).read_text()


@pytest.mark.parametrize(
    ("task", "ended", "where"),
    [("fault", "11 (SIGSEGV)", "in _die_in_the_midst"), ("killed", "9 (SIGKILL)", LESS_MEMORY)],
)
def test_a_rank_that_a_signal_ended_comes_before_those_that_lost_it(
    task: str, ended: str, where: str, tmp_path: Path
) -> None:
    """Otherwise a reader looks for the fault in the network."""
    description = launch(framed(task, tmp_path), tmp_path).failure.description
    assert re.match(rf"local rank 0 \(pid \d+\) was ended by signal {re.escape(ended)}\.", description)
    cause, other = description.split("What another rank said of it:")
    assert where in cause
    assert other.strip().startswith("rank 1: RuntimeError:")


def test_user_error_shows_its_message_alone_and_is_not_retried(tmp_path: Path) -> None:
    outcome = launch(framed("user_error", tmp_path), tmp_path, retries=2)
    assert outcome.failure.description == "taps: expected at most 8, found 9. Use fewer."


def test_retry_has_its_own_folder_and_a_silent_death_shows_the_log(tmp_path: Path) -> None:
    first, second = launch(worker("die", tmp_path, procs=1), tmp_path, retries=1).failures
    description = second.step_failure_data.user_failure_data.description
    assert "no rank left an error message" in description
    assert "rank 0 speaks" in description
    assert "launcher_worker was ended by signal 9 and no rank" in description
    assert LESS_MEMORY in description
    assert "-retry1" in description
    assert "-retry0" not in description
    assert "-retry0" in first.step_retry_data.error.cause.message
    assert len(list((tmp_path / "runs" / "draft").iterdir())) == 2


def test_output_on_the_run_page_is_bounded_and_keeps_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch(worker("flood", tmp_path, procs=1), tmp_path, log_limit_mb=1)
    page = capfd.readouterr().out
    assert 1 << 20 < len(page) < 1.1 * (1 << 20)
    assert "the last words" in page
    (log,) = (tmp_path / "runs").rglob("out.log")
    assert log.stat().st_size > 2_400_000


@pytest.mark.parametrize("task", ["leave", "fall"])
def test_what_a_job_that_ended_by_itself_leaves_behind_is_ended(task: str, tmp_path: Path) -> None:
    outcome = launch(worker(task, tmp_path, "1", procs=1), tmp_path, grace_s=2)
    assert outcome.result.success == (task == "leave")
    assert not survivors(tmp_path)


@dataclass
class RankStopper:
    """Stops rank 1 of the job in `folder` once both ranks take steps; it is the clock of the job's limits.

    Attributes:
        listening: command and address of what was listened on until then.
        stopped: when it was stopped. The clock goes from then on: no load makes ranks that start a stalled job.
    """

    folder: Path
    listening: list[tuple[str, str]] = field(default_factory=list)
    stopped: float | None = None

    def __call__(self) -> float:
        return 0.0 if self.stopped is None else time.monotonic() - self.stopped

    def stop(self) -> None:
        wait_until(self._stop, "steps of both ranks")

    def _stop(self) -> bool:
        self.listening.extend(listeners())
        records = [HeartbeatRecord.read(path) for path in find_now(self.folder, "**/heartbeat.json")]
        pulses = {pulse.rank: pulse for pulse in records if pulse is not None and pulse.said.startswith("step=")}
        if len(pulses) == 2:
            os.kill(pulses[1].pid, signal.SIGSTOP)
            self.stopped = time.monotonic()
        return len(pulses) == 2


def listeners() -> list[tuple[str, str]]:
    """Return command and address of every socket on which a child of this process accepts connections."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            found += [(command, c.laddr.ip) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is Linux's")
@pytest.mark.usefixtures("real_starts")
def test_a_rank_that_stands_still_ends_the_job_by_name(tmp_path: Path) -> None:
    """Until the job ended, its sockets were reachable only from this machine."""
    stopper = RankStopper(tmp_path)
    with meanwhile(stopper.stop):
        outcome = launch(framed("steps", tmp_path), tmp_path, stall_limit_s=5, clock=stopper)
    told = outcome.failure.description
    assert "made no progress for 5 s (launcher.stall_limit_s)" in told
    first, second = (told.index(f"rank {rank} (pid ") for rank in (1, 0))
    assert first < second
    assert re.search(r"rank 1 \(pid \d+, stopped\), which last reported: step=\d+\n", told)
    assert " in all_reduce\n" in told[second:], "where the other one waits"
    (log,) = (tmp_path / "runs").rglob("out.log")
    assert "Current thread" in log.read_text(), "the stacks of the rank that could be asked"
    assert {address for _, address in stopper.listening} == {"127.0.0.1"}
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "run.yaml") in (p.info["cmdline"] or [])]


@pytest.mark.usefixtures("real_starts")
def test_repeated_signals_to_every_process_leave_the_ranks_time_to_save(tmp_path: Path) -> None:
    """Slurm signals each process of a job twice within a millisecond, the Dagster process among them."""
    with hanging_job("save", tmp_path, grace_s=60) as host:
        everyone = [psutil.Process(host.pid), *survivors(tmp_path)]
        assert len(everyone) >= 4
        for process in everyone * 2:
            process.terminate()
        host.wait()
        assert not survivors(tmp_path)
        assert [(tmp_path / f"marker.saved.{rank}").exists() for rank in (0, 1)] == [True, True]


@pytest.mark.usefixtures("real_starts")
def test_ranks_of_a_killed_torchrun_have_time_to_save(tmp_path: Path) -> None:
    with hanging_job("save", tmp_path, grace_s=60) as host:
        (torchrun,) = [p for p in survivors(tmp_path) if "torch.distributed.run" in p.cmdline()]
        torchrun.kill()
        host.wait()
        assert not survivors(tmp_path)
        assert [(tmp_path / f"marker.saved.{rank}").exists() for rank in (0, 1)] == [True, True]


def test_an_only_rank_has_no_torchrun_and_time_to_save_when_its_launcher_is_killed(tmp_path: Path) -> None:
    with hanging_job("save", tmp_path, grace_s=60, procs=1) as host:
        (rank,) = survivors(tmp_path)
        assert rank.ppid() == host.pid
        host.kill()
        wait_until_ended(rank)
        wait_until(lambda: not survivors(tmp_path), lambda: f"the end of {survivors(tmp_path)}")
        assert (tmp_path / "marker.saved.0").exists()


def test_stuck_workers_are_killed_after_the_grace_with_their_hidden_children(tmp_path: Path) -> None:
    with hanging_job("stuck", tmp_path, grace_s=1.5) as host:
        host.send_signal(signal.SIGINT)
        host.wait()
        assert not survivors(tmp_path)


def launch_together(tmp_path: Path, *tasks: tuple[str, ...], **options: float) -> tuple[dict, dict, Any]:
    """Materialize an asset that runs jobs side by side; returns their outcomes, the failures as they came, the result."""
    outcomes, failures = {}, {}

    @dg.asset
    def drafts(context: dg.AssetExecutionContext, launcher: LocalLauncher) -> dg.MaterializeResult:
        peers = [PeerJob(task[0], worker(task[0], tmp_path, *task[1:], procs=1), tmp_path / task[0]) for task in tasks]
        outcomes.update(launcher.run_together(context, peers, on_failure=failures.setdefault))
        return dg.MaterializeResult()

    launcher = LocalLauncher(workdir=str(tmp_path / "runs"), poll_interval_s=0.05, **options)
    result = dg.materialize([drafts], resources={"launcher": launcher}, raise_on_error=False)
    return outcomes, failures, result


def test_jobs_side_by_side_end_each_in_its_own_way(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes, failures, result = launch_together(tmp_path, ("report", "1"), ("die",))
    assert result.success
    assert outcomes["report"].report["number"] == 0
    assert outcomes["die"] is failures["die"]
    assert f"The last lines of {tmp_path / 'die'}" in failures["die"].description
    assert "rank 0 speaks" in capfd.readouterr().out


def test_several_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asks for 2 nodes"):
        LocalLauncher().submit(TorchJob("m", nodes=2), {}, RunDir(tmp_path))
