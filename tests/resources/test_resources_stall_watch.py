"""A job is stalled if no rank makes progress or one rank does not run; a slow job is not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from draftworks.programs.heartbeat import FILE, HeartbeatRecord
from resources.stall_watch import StallWatch

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
