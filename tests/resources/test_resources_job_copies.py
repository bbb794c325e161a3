"""Copies of a job that have died: killed ones start again, an error of the program ends all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftworks.errors import ConfigError
from draftworks.programs.failure import RankFailure
from resources.job_copies import MAX_KILLS, CopyVerdict, CopyWatch
from resources.scheduler import DeadCopy, SeenJob
from resources.torch_job import JobState, RunDir


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
