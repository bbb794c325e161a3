"""Targets with the same weights share their finished answers, also while both run."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from answer_toys import Scripted, answering_run, conversation, rows_of

from draftworks.capture.answers.answer_sets import find_answers_file
from draftworks.capture.answers.regenerate import regenerate_with
from draftworks.config.run_files import RegenerateRun, TargetFiles
from draftworks.data.chat import ChatTokenizer


@pytest.fixture(scope="module")
def chat(tiny_target: TargetFiles) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_target)


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
