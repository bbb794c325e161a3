"""A reasoning target: every supervised token follows exactly the tokens that the target read before it, as rendered."""

from __future__ import annotations

from pathlib import Path

import pytest
from answer_toys import Scripted, answering_run, conversation, rows_of, spelt, supervised
from thinking import thinking_target

from draftworks.capture.answers.answer_sets import CONVERSATIONS, find_answers_file
from draftworks.capture.answers.regenerate import regenerate_with
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Turn, read_conversations
from draftworks.data.slices import ask_both_ways

THOUGHTS = tuple(f"<think>\nI see part {number}.\n</think>\n\nIt is number {number}." for number in range(3))
PLAIN = tuple(f"It is number {number}." for number in range(3))


@pytest.fixture
def target(tiny_target: TargetFiles, tmp_path: Path) -> TargetFiles:
    return thinking_target(tiny_target, tmp_path)


def format_question(number: int) -> str:
    return f"<|im_start|>user\nWhat does function 1 do, part {number}?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_earlier_thoughts_gives_a_sample_for_each_answer(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    source = conversation(1, exchanges=3)
    run = answering_run(target, tmp_path, [source], responses={"thinking": True})
    answers = Scripted(chat, *THOUGHTS)
    regenerate_with(run, answers, chat)
    rows = rows_of(run)
    assert [row.sample_id for row in rows] == [f"{source.id}.1", f"{source.id}.2", source.id]
    history = ""
    for number, row in enumerate(rows):
        prompt = history + format_question(number)
        assert answers.prompts[number] == prompt
        assert spelt(chat, row) == prompt + THOUGHTS[number] + "<|im_end|>"
        assert supervised(chat, row) == THOUGHTS[number] + "<|im_end|>"
        assert row.columns == source.columns
        history = prompt + f"{PLAIN[number]}<|im_end|>\n"


def test_without_thinking_the_mark_of_it_is_only_in_the_prompt_of_the_newest_answer(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=False)
    run = answering_run(target, tmp_path, [conversation(1, exchanges=2)], responses={"thinking": False})
    regenerate_with(run, Scripted(chat, *PLAIN), chat)
    first, second = rows_of(run)
    mark = "<think>\n\n</think>\n\n"
    assert spelt(chat, first) == format_question(0) + mark + PLAIN[0] + "<|im_end|>"
    assert (
        spelt(chat, second)
        == f"{format_question(0)}{PLAIN[0]}<|im_end|>\n{format_question(1)}{mark}{PLAIN[1]}<|im_end|>"
    )
    assert [supervised(chat, row) for row in (first, second)] == [f"{text}<|im_end|>" for text in PLAIN[:2]]


def test_thoughts_that_the_template_keeps_stay_in_one_sample(target, tmp_path: Path):
    """A tool result after an answer is no new question, so the template keeps the thought of that answer."""
    chat = ChatTokenizer.load(target, thinking=True)
    source = conversation(1)
    source = type(source).of([*source.turns, Turn("tool", "exit code 0"), Turn("assistant", "Done.")])
    run = answering_run(target, tmp_path, [source], responses={"thinking": True})
    regenerate_with(run, Scripted(chat, *THOUGHTS), chat)
    (row,) = rows_of(run)
    assert supervised(chat, row) == "".join(f"{text}<|im_end|>" for text in THOUGHTS[:2])


def test_an_answer_without_a_thought_is_kept_and_both_answers_are_supervised(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    run = answering_run(target, tmp_path, [conversation(1, exchanges=3)], responses={"thinking": True})
    regenerate_with(run, Scripted(chat, PLAIN[0], THOUGHTS[1], THOUGHTS[2]), chat)
    first, second = rows_of(run)
    assert supervised(chat, first) == f"{PLAIN[0]}<|im_end|>{THOUGHTS[1]}<|im_end|>"
    assert supervised(chat, second) == f"{THOUGHTS[2]}<|im_end|>"


def test_only_last_turn_is_the_last_sample(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    source = conversation(1, exchanges=3)
    run = answering_run(target, tmp_path, [source], responses={"thinking": True}, only_last_turn=True)
    regenerate_with(run, Scripted(chat, *THOUGHTS), chat)
    (row,) = rows_of(run)
    assert (row.sample_id, supervised(chat, row)) == (source.id, f"{THOUGHTS[2]}<|im_end|>")


def test_conversations_keep_what_was_thought_and_a_resume_changes_nothing(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    sources = [conversation(1, exchanges=2), conversation(2, exchanges=3)]
    run = answering_run(target, tmp_path, sources, responses={"thinking": True})
    first = regenerate_with(run, Scripted(chat, *THOUGHTS), chat)
    again = regenerate_with(run, lambda: pytest.fail("all is answered"), chat)
    assert first.tokens["digest"] == again.tokens["digest"]
    assert (first.conversations, first.tokens["samples"], first.tokens["dropped_turns"]) == (2, 5, 0)
    answers = [
        turn.content for turn in next(read_conversations(run.out / CONVERSATIONS)).turns if turn.role == "assistant"
    ]
    assert answers == list(THOUGHTS[:2])
    assert first.generated_tokens == first.tokens["supervised_tokens"]


def test_answers_of_another_mode_are_not_used(target, tmp_path: Path):
    runs = [
        answering_run(target, tmp_path, [conversation(1)], responses={"thinking": thinking})
        for thinking in (None, True, False)
    ]
    assert len({find_answers_file(run) for run in runs}) == 3


def test_conversations_of_a_mix_are_asked_as_it_says_in_one_run(target, tmp_path: Path):
    chat = ChatTokenizer.load(target)
    run = answering_run(target, tmp_path, ask_both_ways([conversation(1), conversation(2)]))
    regenerate_with(run, Scripted(chat, PLAIN[0]), chat)
    rows = rows_of(run)
    assert [row.columns["thinking"] for row in rows] == ["off", "on"] * 2
    for row in rows:
        assert ("<think>" in spelt(chat, row)) == (
            row.columns["thinking"] == "off"
        )  # the empty thought of this template
    for thinking in (False, True):
        alone = answering_run(target, tmp_path / str(thinking), [conversation(1)], responses={"thinking": thinking})
        regenerate_with(alone, Scripted(chat, PLAIN[0]), ChatTokenizer.load(target, thinking))
        assert rows_of(alone)[0].input_ids.tolist() == rows[thinking].input_ids.tolist()
