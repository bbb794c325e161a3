"""Any number of jobs answer the conversations of one run, come and go at any moment, and write what one writes."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch
from answer_toys import ON_CPU
from capture_toys import WatchedEngine
from coverings import gate_or_long
from test_capture_regenerate import conversation, make_run

from draftworks.capture.answers.answer_sets import find_answers_file
from draftworks.capture.answers.dialogue import Answerer, EngineAnswerer
from draftworks.capture.answers.regenerate import find_max_sample_length, help_to_regenerate, regenerate
from draftworks.capture.engine import load_engine
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.errors import CaptureError

FORK = multiprocessing.get_context("fork")
CONVERSATIONS = [conversation(number, exchanges=1 + number % 2) for number in range(130)]


@pytest.fixture(scope="module")
def chat(tiny_target: TargetFiles) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_target)


@pytest.fixture(scope="module")
def engine(tiny_target: TargetFiles) -> WatchedEngine:
    torch.set_num_threads(1)
    return WatchedEngine(load_engine(tiny_target, ON_CPU, torch.device("cpu")))


def sampled_run(target: TargetFiles, folder: Path, workers: int, count: int = len(CONVERSATIONS)) -> RegenerateRun:
    responses = {"temperature": 1.0, "max_new_tokens": 6, "batch_size": 2}
    return make_run(target, folder, CONVERSATIONS[:count], responses=responses, workers=workers)


def start_helper(run: RegenerateRun, number: int, engine: WatchedEngine, chat: ChatTokenizer) -> ForkProcess:
    own = run.model_copy(update={"worker": number, "out": run.out / str(number)})

    def make_answerer() -> Answerer:
        return EngineAnswerer(engine, own.responses, chat, find_max_sample_length(own))

    process = FORK.Process(target=help_to_regenerate, args=(own, make_answerer, chat))
    process.start()
    return process


def start_main(run: RegenerateRun, engine: WatchedEngine, chat: ChatTokenizer) -> ForkProcess:
    process = FORK.Process(target=regenerate, args=(run, lambda: engine, chat))
    process.start()
    return process


def read_all(run: RegenerateRun) -> dict[str, bytes]:
    made = {str(path.relative_to(run.out)): path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    return made | {"answers": find_answers_file(run).read_bytes()}


@pytest.fixture(scope="module")
def alone(tiny_target: TargetFiles, engine, chat, tmp_path_factory) -> dict[str, bytes]:
    run = sampled_run(tiny_target, tmp_path_factory.mktemp("alone"), workers=1)
    regenerate(run, lambda: engine, chat)
    return read_all(run)


# Where nobody is killed nothing is done that is not done between two kills.
@pytest.mark.parametrize("kills", gate_or_long([0, 2, 6], [2]))
def test_jobs_that_come_and_are_killed_write_what_one_writes(
    tiny_target: TargetFiles, engine, chat, tmp_path: Path, alone: dict[str, bytes], kills: int
):
    run, chance = sampled_run(tiny_target, tmp_path, workers=3), random.Random(2)
    jobs = [start_main(run, engine, chat), *(start_helper(run, number, engine, chat) for number in (1, 2))]
    for _ in range(kills):
        time.sleep(chance.random() / 3)
        number = chance.randrange(3)
        jobs[number].kill()
        jobs[number].join()
        jobs[number] = start_helper(run, number, engine, chat) if number else start_main(run, engine, chat)
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert read_all(run) == alone
    assert sorted(path.suffix for path in run.answers.iterdir()) == [".jsonl", ".lock"]


def test_a_helper_with_nothing_to_do_ends(tiny_target: TargetFiles, engine, chat, tmp_path: Path):
    run = sampled_run(tiny_target, tmp_path, workers=1, count=4)
    regenerate(run, lambda: engine, chat)
    helper = start_helper(run, 1, engine, chat)
    helper.join()
    assert helper.exitcode == 0


class Refusing(WatchedEngine):
    """A concurrent engine that refuses one conversation."""

    concurrent = True

    def generate(self, prompts, sampling, sample_ids, max_total, turn=0, end_ids=()):
        if sample_ids == [CONVERSATIONS[5].id]:
            raise CaptureError("not this one")
        with LOCK:
            return super().generate(prompts, sampling, sample_ids, max_total, turn, end_ids)


LOCK = multiprocessing.Lock()


def test_conversations_that_are_refused_are_left_out_as_by_one_job(tiny_target: TargetFiles, engine, chat, tmp_path):
    runs = [
        sampled_run(tiny_target, tmp_path / str(workers), workers, count=12).model_copy(
            update={"max_rejected_share": 0.5}
        )
        for workers in (1, 2)
    ]
    summaries = [regenerate(run, lambda: Refusing(engine), chat) for run in runs]
    for run, summary in zip(runs, summaries, strict=True):
        assert [each.sample_id for each in summary.missing.rejected] == [CONVERSATIONS[5].id]
        assert "not this one" in (run.out / "quarantine.jsonl").read_text()
