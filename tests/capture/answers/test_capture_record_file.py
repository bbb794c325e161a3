"""The file of finished records: a torn last line is cut off; other damage is reported, and the file left unchanged.
Any number of jobs answer the conversations of one run, come and go at any moment, and write what one writes.
Targets with the same weights share their finished answers, also while both run.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import threading
import time
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch
from answer_toys import ON_CPU, Scripted, answering_run, conversation, rows_of
from capture_toys import WatchedEngine
from coverings import gate_or_long
from test_capture_regenerate import make_run

from draftworks.capture.answers.answer_sets import find_answers_file
from draftworks.capture.answers.dialogue import Answerer, EngineAnswerer
from draftworks.capture.answers.record_file import RecordFile
from draftworks.capture.answers.regenerate import (
    find_max_sample_length,
    help_to_regenerate,
    regenerate,
    regenerate_with,
)
from draftworks.capture.engine import load_engine
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.errors import CaptureError, StoreError


def test_a_file_begun_with_other_settings_is_refused(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    RecordFile(path, {"target": "a"})
    with pytest.raises(StoreError, match=r"answers.jsonl was created with other settings"):
        RecordFile(path, {"target": "b"})


def test_partial_file_torn_anywhere_keeps_its_whole_records(tmp_path: Path):
    path = tmp_path / "partial.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}, {"id": "y", "n": 2}])
    whole = path.read_bytes()
    starts = [whole.index(b'{"id": "x"'), whole.index(b'{"id": "y"'), len(whole)]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        partial = RecordFile(path, {"a": 1})
        assert [name in partial for name in "xy"] == [length >= starts[1], length >= starts[2]]
        partial.extend([{"id": "z", "n": 3}])
        assert partial["z"]["n"] == 3
        assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": "x", "n": 1', "not valid JSON"),
        ("\x00\x00", "not valid JSON"),
        ('["x", 1]', "expected a JSON object, found list"),
        ('{"n": 1}', "expected a record with a text `id`, found None"),
        ('{"id": 3}', "expected a record with a text `id`, found 3"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_whole_line_that_is_no_record_is_named_and_nothing_is_cut(tmp_path: Path, line: str, problem: str, last: bool):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    after = "" if last else '{"id": "y", "n": 2}\n'
    with path.open("a") as stream:
        stream.write(f"{line}\n{after}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"answers.jsonl, line 3: {problem}.*Remove that line"):
        RecordFile(path, {"a": 1})
    assert path.read_bytes() == before


def read_records(path: Path) -> dict[str, int]:
    partial = RecordFile(path, {"a": 1})
    return {name: partial[name]["n"] for name in "xyz" if name in partial}


def test_a_digit_that_was_changed_makes_its_record_absent_and_no_other(tmp_path: Path, caplog):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": name, "n": 1234} for name in "xyz"])
    whole = path.read_bytes()
    place = whole.index(b"1234", whole.index(b'"y"'))
    for at in range(place, place + 4):
        path.write_bytes(whole[:at] + b"7" + whole[at + 1 :])
        assert read_records(path) == {"x": 1234, "z": 1234}
    assert "answers.jsonl, line 3: the record does not match its checksum, and is generated again" in caplog.text
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "y", "n": 1234}])
    assert read_records(path) == dict.fromkeys("xyz", 1234)


def test_no_changed_byte_of_a_record_is_read_as_another_record(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    whole = path.read_bytes()
    start = whole.index(b'{"id"')
    for at in range(start, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with suppress(StoreError):  # a line that is no JSON any more
            assert read_records(path) == {}


def test_a_record_without_a_checksum_among_sealed_ones_counts_as_changed(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    with path.open("a") as stream:
        stream.write('{"id": "y", "n": 2}\n')
    assert read_records(path) == {"x": 1}


def test_records_from_before_there_were_checksums_are_kept_and_given_them(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "answers.jsonl"
    path.write_text('{"identity": {"a": 1}}\n{"id": "x", "n": 1}\n{"id": "y", "n": 2}\n{"id": "z", "n')
    assert read_records(path) == {"x": 1, "y": 2}
    assert "checksums were added to its 2 records" in caplog.text
    sealed = path.read_bytes()
    assert read_records(path) == {"x": 1, "y": 2}
    assert path.read_bytes() == sealed
    path.write_bytes(sealed.replace(b'"n": 2', b'"n": 3'))
    assert read_records(path) == {"x": 1}


def test_a_record_that_changes_while_it_is_in_use_is_not_given_out(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    partial = RecordFile(path, {"a": 1})
    partial.extend([{"id": "x", "n": 1}])
    path.write_bytes(path.read_bytes().replace(b'"n": 1', b'"n": 2'))
    with pytest.raises(StoreError, match="the record x was changed while it was in use"):
        partial["x"]


def write_record_file(path: Path, *records: dict) -> Path:
    partial = RecordFile(path, {"a": 1})
    partial.extend(records)
    return path


def test_records_of_another_file_are_taken_over_once_and_again_when_it_has_grown(tmp_path: Path):
    other = write_record_file(tmp_path / "other.jsonl", {"id": "x", "n": 1}, {"id": "y", "n": 1})
    before = other.read_bytes() + b'{"id": "torn'
    other.write_bytes(before)
    own = RecordFile(write_record_file(tmp_path / "own.jsonl", {"id": "x", "n": 2}), {"a": 1})
    assert [own.copy_records_from(other), own.copy_records_from(other)] == [1, 0]
    assert [own["x"]["n"], own["y"]["n"]] == [2, 1]
    assert other.read_bytes() == before
    write_record_file(other, {"id": "z", "n": 3})
    assert own.copy_records_from(other) == 1
    assert own["z"]["n"] == 3


def test_records_without_checksums_are_taken_over_from_a_file_of_before_there_were_any(tmp_path: Path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"identity": {"a": 1}}\n{"id": "x", "n": 1}\n')
    own = RecordFile(tmp_path / "own.jsonl", {"a": 1})
    assert own.copy_records_from(other) == 1
    assert own["x"] == {"id": "x", "n": 1}


def test_records_of_another_identity_are_not_taken_over(tmp_path: Path):
    other = tmp_path / "other.jsonl"
    RecordFile(other, {"a": 2})
    own = RecordFile(tmp_path / "own.jsonl", {"a": 1})
    with pytest.raises(StoreError, match=r"other.jsonl was created"):
        own.copy_records_from(other)


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
    return made | {"answers": b"".join(sorted(find_answers_file(run).read_bytes().splitlines(keepends=True)))}


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


def test_a_run_of_another_target_with_these_weights_waits_and_answers_nothing_again(
    tiny_target, tmp_path, chat, caplog
):
    conversations = [conversation(number) for number in range(4)]
    run = answering_run(tiny_target, tmp_path, conversations)
    twin = run.model_copy(update={"target": tiny_target.model_copy(update={"name": "twin"}), "out": tmp_path / "twin"})
    waiting = Scripted(chat, "No.")

    class Slow(Scripted):
        def answer(self, dialogues, turn):
            if not self.prompts:
                other.start()
                while "another run is adding answers" not in caplog.text:
                    time.sleep(0.01)
            return super().answer(dialogues, turn)

    other = threading.Thread(target=lambda: regenerate_with(twin, waiting, chat))
    asked = Slow(chat, "Yes.")
    with caplog.at_level("INFO"):
        regenerate_with(run, asked, chat)
        other.join()
    assert len(asked.prompts) == 4
    assert waiting.prompts == []
    assert [row.input_ids.tolist() for row in rows_of(twin)] == [row.input_ids.tolist() for row in rows_of(run)]


def test_answers_kept_elsewhere_are_taken_over_and_left_there(tiny_target, tmp_path: Path, chat):
    conversations = [conversation(number) for number in range(3)]
    earlier = answering_run(tiny_target, tmp_path / "earlier", conversations[:2])
    regenerate_with(earlier, Scripted(chat, "Yes."), chat)
    path = find_answers_file(earlier)
    other = tmp_path / "other.jsonl"
    shutil.copy(path, other)  # answers of another kind are none of this run's
    run = answering_run(tiny_target, tmp_path, conversations, earlier_answers=[path, other])
    asked = Scripted(chat, "No.")
    assert regenerate_with(RegenerateRun.load(run.save(tmp_path / "run.yaml")), asked, chat).resumed == 2
    assert len(asked.prompts) == 1
    assert path.read_bytes() == other.read_bytes()
