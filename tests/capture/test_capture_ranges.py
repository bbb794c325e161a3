"""Ranges of a plan are each finished once, by processes that come and are killed at any moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from draftworks.capture.answers.answer_sets import RangeQueue
from draftworks.storage.lease import LeaseLostError, LeaseTimes

FORK = multiprocessing.get_context("fork")
COUNT = 60


def work(folder: Path) -> None:
    for taken in RangeQueue(folder, COUNT).take():
        time.sleep(0.01)
        with (folder / "log").open("a") as log:
            log.write(f"{taken.number} {os.getpid()}\n")
        taken.finish({"number": taken.number})


def start(folder: Path) -> ForkProcess:
    process = FORK.Process(target=work, args=(folder,))
    process.start()
    return process


@pytest.mark.parametrize("kills", [0, 10])
def test_all_ranges_are_finished_and_only_killed_ones_are_worked_on_twice(tmp_path: Path, kills: int):
    chance, workers = random.Random(1), [start(tmp_path) for _ in range(3)]
    for _ in range(kills):
        time.sleep(chance.random() / 20)
        killed = workers.pop(chance.randrange(3))
        killed.kill()
        workers.append(start(tmp_path))
        killed.join()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert RangeQueue(tmp_path, COUNT).read_results() == [{"number": number} for number in range(COUNT)]
    worked = [int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()]
    assert set(worked) == set(range(COUNT))
    assert len(worked) <= COUNT + kills


def test_a_range_that_is_left_unfinished_is_taken_again(tmp_path: Path):
    numbers = []
    for taken in RangeQueue(tmp_path, 2).take():
        numbers.append(taken.number)
        if len(numbers) > 2:
            taken.finish(None)
    assert sorted(numbers) == [0, 0, 1, 1]
    with pytest.raises(FileNotFoundError):
        RangeQueue(tmp_path, 3).read_results()


def test_who_lost_a_range_publishes_nothing_and_the_folder_may_go(tmp_path: Path):
    times = LeaseTimes(renew_s=3600, lease_s=0.2)
    (tmp_path / "plan").mkdir()
    slow, waited = RangeQueue(tmp_path / "plan", 1, times).take(), []
    lost = next(slow)
    lease = tmp_path / "plan" / "0.lock" / "1"
    owner = json.loads(lease.read_text())
    lease.write_text(json.dumps({**owner, "place": {**owner["place"], "host": "elsewhere"}}))
    (again,) = list(_take_all(RangeQueue(tmp_path / "plan", 1, times), waited))
    assert again == "finished"
    assert waited
    with pytest.raises(LeaseLostError):
        lost.finish("late")
    assert RangeQueue(tmp_path / "plan", 1).read_results() == ["finished"]
    (tmp_path / "plan").rename(tmp_path / "old")
    assert list(slow) == []


def _take_all(queue: RangeQueue, waited: list[int]):
    for taken in queue.take(lambda: waited.append(1)):
        assert replace(taken).lease.number == 2
        taken.finish("finished")
        yield "finished"
