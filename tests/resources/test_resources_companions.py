"""Companions of a job, as plain processes: started again when they are killed, ended in order, and blamed when they fail.
SGLang as a resource: the deployment's settings for programs, and the end of a server's log in the run's log.
A job is stalled if no rank makes progress or one rank does not run; a slow job is not.
What schedulers are asked about before a run: jobs of the shape that the run will submit. A script stands for sbatch.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import dagster as dg
import pytest
import yaml
from waiting import HANG_S, wait_until

from draftworks.config.capture import SGLangSpec
from draftworks.errors import ConfigError
from draftworks.programs.failure import RankFailure
from draftworks.programs.heartbeat import FILE, HeartbeatRecord
from draftworks.targets.registry import Registry
from resources.companions import Companion, RunningCompanion, RunningCompanions
from resources.engine_servers import SGLangServer
from resources.launcher_checks import find_launcher_problems
from resources.stall_watch import StallWatch
from resources.torch_job import JobState, JobStatus, RunDir, TorchJob

SLEEP, DONE = ("sleep", "60"), ("true",)


@dataclass
class Shell:
    """A launcher of commands: the arguments of a job are its command."""

    folder: Path
    started: list[subprocess.Popen] = field(default_factory=list)
    cancelled: list[subprocess.Popen] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    settled: list[subprocess.Popen] = field(default_factory=list)

    def submit(self, companion: Companion) -> RunningCompanion:
        self.started.append(subprocess.Popen(companion.job.args))
        return RunningCompanion(companion, self.started[-1], RunDir.create(companion.folder, "run", 0))

    def poll(self, handle: subprocess.Popen) -> JobStatus:
        code = handle.poll()
        if code is None:
            return JobStatus(JobState.RUNNING)
        return JobStatus(JobState.SUCCEEDED if code == 0 else JobState.FAILED, code)

    def cancel(self, handle: subprocess.Popen) -> None:
        self.cancelled.append(handle)
        handle.kill()
        handle.wait()

    def begin(self, *companions: Companion) -> RunningCompanions:
        running = RunningCompanions(self.submit, self.poll, self.cancel, self.warnings.append, self.settled.append)
        for each in companions:
            running.start(each)
        return running

    def make(self, name: str, command: tuple[str, ...] = SLEEP, **options) -> Companion:
        return Companion(TorchJob("module", command), self.folder / name, **options)

    def kill(self, index: int) -> None:
        self.started[index].kill()
        self.started[index].wait()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for process in shell.started:
        process.kill()
        process.wait()


def watch_until(running: RunningCompanions, condition: Callable[[], bool]) -> None:
    wait_until(lambda: running.watch() or condition(), "what a companion is to do")


@pytest.mark.parametrize("serves", [True, False])
def test_a_killed_one_is_started_again_as_often_as_it_may(shell: Shell, serves: bool) -> None:
    running = shell.begin(shell.make("memory", serves=serves, restarts=2))
    for number in range(2):
        shell.kill(number)
        watch_until(running, lambda number=number: len(shell.started) == number + 2)
        assert shell.started[-1].poll() is None
    assert "memory has died, and is started again" in shell.warnings[0]
    shell.kill(2)
    with pytest.raises(dg.Failure, match="memory: module was ended by signal 9") as failure:
        running.watch()
    assert failure.value.allow_retries
    assert len(list((shell.folder / "memory").iterdir())) == 3


def test_an_error_that_one_leaves_ends_the_job_at_once(shell: Shell) -> None:
    running = shell.begin(shell.make("control", restarts=2, serves=True))
    (files,) = (shell.folder / "control").iterdir()
    (files / "ranks").mkdir()
    left = RankFailure.of(ConfigError("the port is taken"), 0)
    (files / "ranks" / "error.json").write_text(json.dumps(left.to_json()))
    shell.kill(0)
    with pytest.raises(dg.Failure, match="control: the port is taken") as failure:
        running.watch()
    assert not failure.value.allow_retries
    assert len(shell.started) == 1


def test_one_that_serves_must_not_end_and_others_may(shell: Shell) -> None:
    running = shell.begin(shell.make("control", DONE, serves=True, restarts=3), shell.make("produce", DONE))
    watch_until(running, lambda: len(shell.started) == 4)
    assert all("control" in each for each in shell.warnings)


def test_at_the_end_those_that_serve_are_not_waited_for_and_end_last(shell: Shell) -> None:
    running = shell.begin(
        shell.make("control", serves=True), shell.make("produce", ("sleep", "0.3")), shell.make("stuck")
    )
    running.finish(grace_s=1.0)
    assert shell.cancelled == [shell.started[2], shell.started[0]]


def test_without_a_grace_that_all_use_the_end_comes_at_once(shell: Shell) -> None:
    running = shell.begin(shell.make("control", serves=True), shell.make("produce", DONE))
    began = time.monotonic()
    running.finish(grace_s=HANG_S)
    assert time.monotonic() - began < HANG_S
    assert shell.cancelled == [shell.started[0]]
    assert shell.settled == [shell.started[1]], "what ended by itself is settled; a cancelled job is by being cancelled"


def test_programs_get_the_settings_of_the_deployment():
    spec = SGLangSpec(python="/sglang/bin/python", start_timeout_s=7, request_timeout_s=8, attempts=2, grace_s=3)
    assert SGLangServer(**spec.model_dump()).spec == spec


def run_with(folder: Path, fails: bool) -> list[str]:
    """Messages in the log of a run whose step had a server with its files in `folder`."""

    @dg.asset
    def serving(context, sglang: SGLangServer) -> None:
        with sglang.log_output_of_server(context, folder):
            sglang.locate_log(folder).write_text(
                "".join(f"line {number}\n" for number in range(9000)) + "out of memory\n"
            )
            if fails:
                raise dg.Failure("no answer")

    with dg.DagsterInstance.ephemeral() as instance:
        resources = {"sglang": SGLangServer(python="/nowhere")}
        result = dg.materialize([serving], resources=resources, instance=instance, raise_on_error=False)
        assert result.success is not fails
        return [entry.user_message for entry in instance.all_logs(result.run_id)]


def test_after_a_failure_the_end_of_the_servers_log_is_in_the_runs_log(tmp_path):
    [told] = [message for message in run_with(tmp_path, fails=True) if "the end of" in message]
    assert str(tmp_path / "sglang.log") in told
    assert told.rstrip().endswith("out of memory")
    assert "line 0\n" not in told


def test_after_a_success_one_line_says_where_the_servers_log_is(tmp_path):
    [told] = [message for message in run_with(tmp_path, fails=False) if "sglang.log" in message]
    assert told == f"the server's log is {tmp_path / 'sglang.log'}"


def test_a_server_that_never_started_has_no_log_to_tell(tmp_path):
    @dg.asset
    def serving(context, sglang: SGLangServer) -> None:
        with sglang.log_output_of_server(context, tmp_path / "absent"):
            pass

    assert dg.materialize([serving], resources={"sglang": SGLangServer(python="/nowhere")}).success


LIMIT_S = 100.0


class Job:
    """Two ranks whose heartbeats a test writes, and a watch with a fake clock."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "out.log"
        self.folder = folder
        self.now = 0.0
        self.ranks = [HeartbeatRecord(0, 10), HeartbeatRecord(1, 11)]
        self.watch = StallWatch(folder, self.log, LIMIT_S, clock=lambda: self.now)

    def write(self) -> None:
        for pulse in self.ranks:
            path = self.folder / str(pulse.rank) / FILE
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(asdict(pulse)))

    def live(self, seconds: float, alive=(0, 1), busy=(0, 1)) -> list[int] | None:
        """Advance the clock while some ranks write and some make progress; return the ranks of a detected stall."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            for rank in alive:
                pulse = self.ranks[rank]
                self.ranks[rank] = replace(pulse, written=pulse.written + 1, beats=pulse.beats + (rank in busy))
            self.write()
            if (found := self.watch.find_stalled()) is not None:
                return [pulse.rank for pulse in found]
        return None


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_that_gets_on_is_left_alone_for_ever(job: Job):
    assert job.live(1000) is None


def test_one_rank_may_wait_for_the_other_as_long_as_that_one_gets_on(job: Job):
    assert job.live(1000, busy=(1,)) is None


def test_ranks_that_were_put_away_with_their_files_are_forgotten(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    job = Job(tmp_path / "ranks")
    assert job.live(50) is None
    for rank in (0, 1):
        (job.folder / str(rank)).rename(tmp_path / str(rank))
    job.ranks = [HeartbeatRecord(2, 12), HeartbeatRecord(3, 13)]
    assert job.live(1000) is None


def test_nobody_getting_on_is_a_stall(job: Job):
    assert job.live(50) is None
    assert job.live(99, busy=()) is None
    assert job.live(3, busy=()) is not None


def test_a_rank_that_does_not_run_is_named_first_although_the_other_is_busy(job: Job):
    assert job.live(50) is None
    assert job.live(99, alive=(0,)) is None
    assert job.live(3, alive=(0,)) == [1, 0]


def test_a_rank_that_has_ended_may_be_silent(job: Job):
    job.live(5)
    job.ranks[1] = replace(job.ranks[1], ended=True)
    assert job.live(1000, alive=(0,), busy=(0,)) is None


def test_torchrun_that_does_not_end_after_its_ranks_is_a_stall(job: Job):
    job.live(5)
    job.ranks = [replace(pulse, ended=True) for pulse in job.ranks]
    assert job.live(200, alive=()) is not None


def test_output_is_progress(job: Job):
    for _ in range(5):
        assert job.live(80, busy=()) is None
        with job.log.open("a") as log:
            log.write("still loading\n")


def test_time_in_which_nobody_looked_does_not_count(job: Job):
    """The whole installation was suspended."""
    job.live(50)
    job.now += 100_000
    assert job.live(80, busy=()) is None


def test_starting_takes_its_time(job: Job):
    job.now = 1.0
    job.watch.find_stalled()
    for _ in range(59):
        job.now += 10
        assert job.watch.find_stalled() is None
    job.now += 20
    assert [job.watch.find_stalled() for _ in range(3)][-1] is None
    for _ in range(3):
        job.now += 10
        found = job.watch.find_stalled()
    assert found == []


def test_a_heartbeat_that_is_no_file_or_no_json_is_none(tmp_path: Path):
    for text in ("", "[]", "{}", "5", '{"rank": 0'):
        (tmp_path / FILE).write_text(text)
        assert HeartbeatRecord.read(tmp_path / FILE) is None
    assert HeartbeatRecord.read(tmp_path) is None


def make_registry(folder: Path, **target: object) -> Registry:
    """A registry whose jobs run in a Slurm that takes everything and writes down the options."""
    script = folder / "bin" / "sbatch"
    (folder / "registry" / "targets").mkdir(parents=True)
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\ngrep -h "^#SBATCH" | tr "\\n" " " >>"{folder}/asked"\necho >>"{folder}/asked"\n')
    script.chmod(0o755)
    launcher = {"kind": "slurm", "commands": str(script.parent)}
    values = {"model": "/nowhere", "dataset": "tiny", **target}
    (folder / "registry" / "deployment.yaml").write_text(yaml.safe_dump({"launcher": launcher}))
    (folder / "registry" / "targets" / "one.yaml").write_text(yaml.safe_dump(values))
    return Registry(folder / "registry")


def ask(registry: Registry, program: str) -> str:
    assert find_launcher_problems(registry.load_target("one"), registry, [program]) == []
    (asked,) = (registry.root.parent / "asked").read_text().splitlines()
    return asked


@pytest.mark.parametrize(
    ("capture", "gpus"),
    [
        ({"backend": "hf", "device": "cuda", "processes": 2}, 2),
        ({"backend": "sglang_server", "device": "cuda", "server": {"tp_size": 4, "replicas": 2}}, 8),
        ({"backend": "hf", "device": "cpu"}, None),
    ],
    ids=["processes", "servers", "cpu"],
)
def test_a_capture_is_asked_for_with_the_gpus_of_its_processes_and_servers(tmp_path: Path, capture, gpus):
    asked = ask(make_registry(tmp_path, capture=capture), "capture")
    assert (f"--gpus-per-node={gpus} " in asked) if gpus else ("--gpus" not in asked)


@pytest.mark.parametrize(("endpoint", "gpus"), [(None, 4), ("https://answers/v1", 1)], ids=["own", "elsewhere"])
def test_answers_need_the_gpus_of_servers_unless_an_endpoint_gives_them(tmp_path: Path, endpoint, gpus):
    capture = {"backend": "sglang_server", "device": "cuda", "server": {"tp_size": 4}}
    responses = (
        {}
        if endpoint is None
        else {"responses": {"endpoint": {"base_urls": [endpoint], "model": "m", "server": "vllm"}}}
    )
    assert f"--gpus-per-node={gpus} " in ask(make_registry(tmp_path, capture=capture, **responses), "regenerate")
