"""Companions of a job, as plain processes: started again when they are killed, ended in order, and blamed when they fail."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import pytest
from waiting import HANG_S, wait_until

from draftworks.errors import ConfigError
from draftworks.programs.failure import RankFailure
from resources.companions import Companion, RunningCompanion, RunningCompanions
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
