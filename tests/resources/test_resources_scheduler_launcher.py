"""What only jobs of a scheduler can meet: queues, refusals, silence, lost nodes, claims of other jobs, dead runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.test_utils import create_run_for_test
from dagster_pipes import encode_param
from launcher_contract import TOYS, make_job, play, wait_until_up
from launcher_harnesses import QueueHarness, ToyHarness
from processes import ending, wait_until_ended
from toy_scheduler import ToyScheduler
from waiting import wait_until

from draftworks.errors import ConfigError, LauncherError
from draftworks.programs.failure import RankFailure
from resources.dead_runs import JOB_TAG, TAG, DeadRuns, release_dead_runs
from resources.deployment_launcher import make_deployment_launcher
from resources.job_claims import JobClaim, end_abandoned_job, is_taken_over
from resources.process_tree import RunProcess
from resources.scheduler import DeadCopy, JobRequest, Scheduler, SeenJob
from resources.scheduler_launcher import ScheduledJob, SchedulerLauncher
from resources.torch_job import JobState, RunDir, TorchJob

LAG_S = 600.0
"""So long that a test that waits for it is ended by pytest-timeout or seen."""
STALL_S = 30.0


@pytest.fixture
def harness(tmp_path: Path):
    harness = ToyHarness(tmp_path)
    yield harness
    harness.clean_up()


def begin(harness: ToyHarness, run_id: str = "0" * 8, job_id: bool = True, is_heard: bool = True) -> JobClaim:
    """Start a job as a run did whose process is not there any more; returns its claim.

    A job that is not heard sends no messages, as it runs beside another.
    """
    job = make_job(harness, "steps")
    harness.claim.parent.mkdir(exist_ok=True)
    files = RunDir.create(harness.folder / "earlier", run_id, 0)
    owner = RunProcess.of(run_id, os.getpid())
    owner = replace(owner, started=owner.started - 1)
    claim = JobClaim.begin(job.identity.name, job.identity.made, files, owner, job.launcher)
    claim.publish(harness.claim)
    pipes = {"DAGSTER_PIPES_MESSAGES": {"path": str(files.messages)}, "DAGSTER_PIPES_CONTEXT": {"data": {"extras": {}}}}
    env = {name: encode_param(value) for name, value in pipes.items()} if is_heard else {}
    created = harness.scheduler.create(JobRequest(job.identity.name, job, env, files, harness.claim))
    wait_until_up(harness)
    if job_id:
        claim = claim.of_job(created)
        claim.publish(harness.claim)
    return claim


def test_what_waits_in_the_queue_says_why_and_is_no_stall(tmp_path: Path):
    harness = QueueHarness(tmp_path)
    (harness.scheduler.root / "full").touch()

    def wait() -> None:
        wait_until(lambda: harness.clock.seconds > 10 * STALL_S)
        (harness.scheduler.root / "full").unlink()
        wait_until_up(harness)

    played = play(harness, "steps", wait, stall_limit_s=STALL_S)
    assert played.lines.count("job 0001 waits: Resources: no node is free") == 1
    assert len(played.jobs) == 1


def test_a_queue_that_refuses_speaks_for_itself_and_leaves_no_claim(harness: ToyHarness):
    (harness.scheduler.root / "refuses").write_text("no such partition: gpu")
    with pytest.raises(ConfigError, match="no such partition: gpu"):
        raise_of(harness)
    assert not harness.claim.exists()


def test_a_scheduler_that_cannot_be_reached_is_an_error_at_the_start_and_none_later(harness: ToyHarness):
    (harness.scheduler.root / "silent").touch()
    with pytest.raises(LauncherError, match="does not answer"):
        raise_of(harness)
    (harness.scheduler.root / "silent").unlink()

    def be_silent_for_a_while() -> None:
        wait_until_up(harness)
        (harness.scheduler.root / "silent").touch()
        time.sleep(0.3)
        (harness.scheduler.root / "silent").unlink()

    played = play(harness, "steps", be_silent_for_a_while)
    assert len(played.jobs) == 1
    assert any("the scheduler cannot be asked about job 0001" in line for line in played.lines)


def raise_of(harness: ToyHarness) -> None:
    """Raise what a start of the job raises."""
    raised: list[BaseException] = []

    @dg.asset
    def draft(context) -> dg.MaterializeResult:
        try:
            harness.make_launcher().run(context, make_job(harness, "steps"), run_dir=harness.folder / "runs")
        except BaseException as error:
            raised.append(error)
        return dg.MaterializeResult()

    dg.materialize([draft])
    raise raised[0]


def test_a_job_that_only_gets_lost_fails_after_three_times_in_the_words_of_the_scheduler(harness: ToyHarness):
    def preempt() -> None:
        for _ in range(3):
            wait_until_up(harness)
            harness.preempt()

    played = play(harness, "forget", preempt)
    (failure,) = played.failures
    assert harness.count_submitted() == 3
    assert "ended 3 times without a new checkpoint between: Preempted" in failure.metadata["scheduler_says"].value
    assert not harness.claim.exists()


@pytest.mark.parametrize("is_created", [False, True], ids=["not-sent", "answer-lost"])
def test_a_scheduler_that_is_away_when_a_job_is_submitted_again_is_waited_for(
    harness: ToyHarness, is_created: bool, monkeypatch: pytest.MonkeyPatch
):
    create, calls = ToyScheduler.create, list[str]()

    def lose(scheduler: ToyScheduler, request: JobRequest) -> str:
        calls.append(request.name)
        if len(calls) != 2:
            return create(scheduler, request)
        if is_created:
            create(scheduler, request)
        raise LauncherError("toy: no answer")

    def preempt() -> None:
        wait_until_up(harness)
        harness.preempt()
        wait_until_up(harness)

    monkeypatch.setattr(ToyScheduler, "create", lose)
    (job,) = play(harness, "steps", preempt).jobs
    assert job.metadata["submissions"] == harness.count_submitted() == 2
    assert not harness.claim.exists()


def test_after_a_loss_fewer_nodes_will_do(harness: ToyHarness):
    def preempt() -> None:
        wait_until_up(harness)
        harness.preempt()
        wait_until_up(harness)

    spec = {"nodes": 3, "min_nodes": 2}
    job = replace(make_job(harness, "steps", **spec), nodes=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher_contract.make_job", lambda *_, **__: job)
        play(harness, "steps", preempt, **spec)
    asked = [json.loads(path.read_text())["nodes"] for path in sorted(harness.scheduler.root.glob("*/job.json"))]
    assert asked == [[3, 3], [2, 3]]


def test_a_job_whose_owner_died_before_it_wrote_the_id_is_found_by_its_name(harness: ToyHarness):
    earlier = begin(harness, job_id=False)
    played = play(harness, "steps", lambda: wait_until(lambda: JobClaim.read(harness.claim).owner != earlier.owner))
    assert len(played.jobs) == harness.count_submitted() == 1, played.failures
    assert not harness.claim.exists()


def test_a_companion_that_ended_while_nobody_waited_for_it_has_done_its_part(harness: ToyHarness):
    begin(harness, is_heard=False)
    (harness.work / "finish").touch()
    wait_until(lambda: not harness.scheduler.list())
    launcher = harness.make_launcher().model_copy(update={"files_lag_s": LAG_S})
    job, submitted, states = make_job(harness, "steps"), [], []

    @dg.asset
    def draft(context) -> dg.MaterializeResult:
        for _ in range(2):
            files = launcher.prepare(context, job, harness.folder / "runs").files
            handle = launcher.submit(job, {}, files)
            submitted.append(handle.id)
            wait_until(lambda handle=handle: launcher.poll(handle).state.is_final)
            states.append(launcher.poll(handle).state)
        launcher.settle(handle)
        return dg.MaterializeResult()

    started = time.monotonic()
    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([draft], instance=instance)
    assert submitted == ["0001", "0002"], "one that this process has seen ended is started again"
    assert states == [JobState.SUCCEEDED] * 2
    assert time.monotonic() - started < LAG_S, "what sends no report is not waited for"
    assert not harness.claim.exists()


@pytest.mark.parametrize("damage", ["{", None])
def test_a_job_without_a_readable_claim_is_ended_and_made_again(harness: ToyHarness, damage: str | None):
    begin(harness)
    harness.claim.unlink() if damage is None else harness.claim.write_text(damage)
    played = play(harness, "steps", lambda: wait_until(lambda: harness.count_submitted() == 2))
    assert len(played.jobs) == 1
    assert [each.state for each in harness.scheduler.look_at_all()] == [JobState.CANCELLED, JobState.SUCCEEDED]


def test_a_job_in_the_same_folder_that_is_not_the_same_is_ended_first(harness: ToyHarness):
    replace(begin(harness), name="dw-other").publish(harness.claim)
    played = play(harness, "steps", lambda: wait_until(lambda: harness.count_submitted() == 2))
    assert len(played.jobs) == 1
    assert harness.scheduler.look("0001").state is JobState.CANCELLED
    assert any("job 0001 of run 00000000 made the same with other inputs: it is ended" in line for line in played.lines)


def test_who_starts_over_ends_the_job_of_a_dead_run_and_of_no_other(harness: ToyHarness):
    claim = begin(harness)
    replace(claim, owner=RunProcess.of("other", os.getpid())).publish(harness.claim)
    assert end_abandoned_job(harness.claim) is None
    claim.publish(harness.claim)
    assert end_abandoned_job(harness.claim) == "0001"
    assert not harness.scheduler.list()
    assert not harness.claim.exists()
    assert end_abandoned_job(harness.claim) is None


def test_a_deployment_launcher_runs_each_job_where_it_belongs(harness: ToyHarness):
    begin(harness)
    launcher = make_deployment_launcher(make_job(harness, "steps").launcher)
    local = replace(make_job(harness, "steps"), launcher=None)
    assert type(launcher._choose(local)).__name__ == "LocalLauncher"
    assert type(launcher._choose(make_job(harness, "steps"))).__name__ == "SchedulerLauncher"
    instance = dg.DagsterInstance.ephemeral()
    with dg.build_asset_context(instance=instance) as context, pytest.MonkeyPatch.context() as patch:
        patch.setattr("resources.local_launcher.LocalLauncher.prepare", lambda self, context, job, folder: folder)
        assert launcher.prepare(context, local, harness.folder) == harness.folder
    assert not harness.scheduler.list(), "what another launcher has left is ended before the job runs here"


def test_the_slot_of_a_dead_run_stays_taken_while_its_job_lives(harness: ToyHarness, tmp_path: Path):
    (tmp_path / "home").mkdir()
    with dg.instance_for_test(temp_dir=str(tmp_path / "home")) as instance:
        instance.event_log_storage.set_concurrency_slots("gpu", 1)
        run = create_run_for_test(instance, job_name="job", status=dg.DagsterRunStatus.STARTED)
        claim = begin(harness, run.run_id)
        tags = {TAG: claim.owner.to_tag(), f"{JOB_TAG}{claim.name}": str(harness.claim)}
        instance.add_run_tags(run.run_id, tags)
        assert instance.event_log_storage.claim_concurrency_slot("gpu", run.run_id, "step").is_claimed
        for _ in range(2):
            assert release_dead_runs(instance) == DeadRuns(kept=(run.run_id,))
        (harness.scheduler.root / "silent").touch()
        assert release_dead_runs(instance) == DeadRuns(kept=(run.run_id,)), "a scheduler that cannot be asked"
        (harness.scheduler.root / "silent").unlink()
        assert release_dead_runs(instance, takes=lambda claim: is_taken_over(claim, "t", ["other"])).kept
        mine = release_dead_runs(instance, takes=lambda claim: is_taken_over(claim, "t", ["draft"]))
        assert mine == DeadRuns(released=(run.run_id,)), "the run that waits for the job itself needs the slot"
        assert instance.event_log_storage.get_concurrency_info("gpu").active_slot_count == 0
        assert harness.scheduler.list()
        again = create_run_for_test(instance, job_name="job", status=dg.DagsterRunStatus.STARTED)
        replace(claim, owner=replace(claim.owner, run_id=again.run_id)).publish(harness.claim)
        instance.add_run_tags(again.run_id, {**tags, TAG: replace(claim.owner, run_id=again.run_id).to_tag()})
        assert instance.event_log_storage.claim_concurrency_slot("gpu", again.run_id, "step").is_claimed
        harness.scheduler.end("0001", 1.0)
        assert release_dead_runs(instance) == DeadRuns(released=(again.run_id,))


STEP_OF_A_RUN = """
import multiprocessing, os, sys, time
sys.path[:0] = {path!r}
import contract_host, launcher_harnesses
from pathlib import Path
from resources import dead_runs

def step():
    import threading
    parent = multiprocessing.parent_process()
    threading.Thread(target=dead_runs._watch, args=(parent,), daemon=True).start()
    contract_host.run(launcher_harnesses.ToyHarness(Path({folder!r})), "steps", {{}})

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=step)
    process.start()
    Path({folder!r}, "step.pid").write_text(str(process.pid))
    process.join()
"""


def test_a_step_whose_run_dies_leaves_its_job_to_the_next_run(harness: ToyHarness, tmp_path: Path):
    code = STEP_OF_A_RUN.format(path=[str(TOYS), str(TOYS.parents[1])], folder=str(tmp_path))
    (tmp_path / "run.py").write_text(code)
    run = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], stderr=(tmp_path / "log").open("wb"))
    with ending(run):
        wait_until_up(harness)
        step = psutil.Process(int((tmp_path / "step.pid").read_text()))
        run.send_signal(signal.SIGKILL)
        run.wait()
        wait_until_ended(step)
    wait_until_up(harness)
    assert JobClaim.read(harness.claim).job_id == "0001"
    assert "goes on, and the next run waits for it" in (tmp_path / "log").read_text()


@dataclass
class ScriptedScheduler(Scheduler):
    """Says of its one array what a test has written into `seen`."""

    seen: SeenJob
    refusal: str = ""
    restarted: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    engine = "scripted"
    has_arrays = True

    def create(self, request: JobRequest) -> str:
        return "7"

    def find(self, name: str) -> SeenJob | None:
        return None

    def look(self, id: str) -> SeenJob | None:
        return self.seen

    def end(self, id: str, grace_s: float) -> None:
        self.ended.append(id)

    def restart(self, id: str, copy: int) -> None:
        self.restarted.append(copy)
        if self.refusal:
            raise LauncherError(self.refusal)

    def list(self) -> list[SeenJob]:
        return [self.seen]


def submit(launcher: SchedulerLauncher, job: TorchJob, files: RunDir) -> ScheduledJob:
    """Submit a job that this process has claimed."""
    job.identity.claim.parent.mkdir()
    owner = RunProcess.of("0" * 8, os.getpid())
    JobClaim.begin(job.identity.name, "", files, owner, job.launcher).publish(job.identity.claim)
    return launcher.submit(job, {}, files)


def test_a_run_that_ends_first_leaves_the_claim_to_the_one_that_took_the_job_over(harness: ToyHarness):
    """The other is told the result, at whatever moment between its claim and its next look."""
    launcher = SchedulerLauncher(settings=json.dumps(harness.make_settings(poll_interval_s=1e-6)))
    launcher.__dict__["scheduler"] = ScriptedScheduler(SeenJob("7", "dw-1", JobState.SUCCEEDED))
    job, files = make_job(harness, "steps"), RunDir(harness.folder)
    first = submit(launcher, job, files)
    claim = JobClaim.read(job.identity.claim)
    claim.of_owner(RunProcess.of("1" * 8, os.getppid())).publish(job.identity.claim)
    launcher.settle(first)
    second = launcher.submit(job, {}, files)
    assert second.id == first.id
    launcher.settle(second)
    assert not job.identity.claim.exists()


@pytest.mark.parametrize("refusal", ["", "Slurm: invalid job id"], ids=["taken", "refused"])
def test_a_dead_copy_is_started_again_and_one_that_failed_ends_all(harness: ToyHarness, refusal: str):
    running = SeenJob("7", "dw-1", JobState.RUNNING)
    scheduler = ScriptedScheduler(running, refusal)
    launcher = SchedulerLauncher(settings=json.dumps(harness.make_settings(poll_interval_s=1e-6)), files_lag_s=0.0)
    launcher.__dict__["scheduler"] = scheduler
    job = replace(make_job(harness, "steps"), copies=3)
    files = RunDir(harness.folder)
    handle = submit(launcher, job, files)
    assert launcher.has_arrays(job.launcher)

    def poll(state: JobState, *dead: DeadCopy) -> JobState:
        scheduler.seen = replace(running, state=state, dead=dead)
        return launcher.poll(handle).state

    assert poll(JobState.RUNNING) is JobState.RUNNING
    killed = DeadCopy(1, "0")
    assert poll(JobState.RUNNING, killed) is JobState.RUNNING
    assert poll(JobState.RUNNING, killed) is JobState.RUNNING
    assert scheduler.restarted == [1], "once for each death"
    error = files.of_copy(2).ranks / "error.json"
    error.parent.mkdir(parents=True)
    error.write_text(json.dumps(RankFailure.of(ValueError("v"), rank=0).to_json()))
    assert scheduler.ended == []
    assert poll(JobState.RUNNING, killed, DeadCopy(2, "0")) is JobState.FAILED
    assert (scheduler.ended, scheduler.restarted) == (["7"], [1])
    assert "copy 2 failed" in handle.status.reason


def test_copies_that_have_all_ended_well_need_no_report(harness: ToyHarness):
    launcher = SchedulerLauncher(settings=json.dumps(harness.make_settings(poll_interval_s=1e-6)), files_lag_s=60.0)
    launcher.__dict__["scheduler"] = ScriptedScheduler(SeenJob("7", "dw-1", JobState.SUCCEEDED))
    job, files = replace(make_job(harness, "steps"), copies=2), RunDir(harness.folder)
    assert launcher.poll(submit(launcher, job, files)).state is JobState.SUCCEEDED
