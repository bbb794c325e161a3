"""Rung 6: the acceptance of a live server is counted as the walk counts, and compared with the walk."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from draftworks.data.tokenized import TokenRow
from draftworks.evaluation.ladder.decoding import DecodingLimits
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.server_acceptance import (
    ServerPrompt,
    ask_server,
    build_server_prompts,
    compare_with_walk,
)
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.sglang.speculation import SpeculatedAnswer

RESAMPLING = Resampling(resamples=200)
LIMITS = DecodingLimits(8)


def row(name: str, *parts: tuple[int, bool]) -> TokenRow:
    """Tokens 0, 1, 2, …; each part is a length and whether it is an answer."""
    mask = np.concatenate([np.full(length, answer) for length, answer in parts])
    return TokenRow(name, np.arange(len(mask), dtype=np.int32), mask)


def served_as(passes: list[int], cut: int = 0) -> SpeculatedAnswer:
    """Return a server's answer with these accepted counts, of which it cut off the last `cut` tokens."""
    emitted = 1 + sum(passes) + len(passes)
    counts = np.bincount(passes) if passes else []
    return SpeculatedAnswer(tuple(range(emitted - cut)), len(passes), tuple(int(count) for count in counts))


def test_every_answer_of_a_conversation_is_asked_for_with_all_that_was_said_before():
    talk = row("a", (3, False), (2, True), (4, False), (3, True))
    first, second = build_server_prompts([talk], 1, LIMITS, max_length=12)
    assert (first.prompt, first.expected) == ((0, 1, 2), (3, 4))
    assert (second.prompt, second.expected) == (tuple(range(9)), (9, 10, 11))
    assert (first.max_new_tokens, second.max_new_tokens) == (8, 3)


def test_samples_are_chosen_by_id_and_those_without_a_prompt_left_out():
    rows = [row("c", (1, False), (2, True)), row("b", (1, False), (2, True)), row("a", (3, True))]
    asked = build_server_prompts(rows, 1, LIMITS, max_length=8)
    assert [question.sample_id for question in asked] == ["b"]


@given(passes=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
def test_tokens_cut_off_at_the_end_are_not_accepted(passes: list[int], data: st.DataObject):
    cut = data.draw(st.integers(0, passes[-1]))
    found = served_as(passes, cut).list_accepted_per_pass()
    assert len(found) == len(passes)
    # The walk's own rule: of the last pass no more is accepted than came out of it.
    assert sum(found) == sum(passes[:-1]) + min(passes[-1], passes[-1] + 1 - cut)


def test_all_answers_of_a_sample_count_together():
    asked = [ServerPrompt("a", (0,), (), 9), ServerPrompt("b", (0,), (), 9), ServerPrompt("a", (0, 1), (), 9)]
    answers = {0: served_as([2, 0]), 1: served_as([1]), 2: served_as([0, 0, 1])}
    served = ask_server(asked, lambda question: answers[asked.index(question)], concurrency=1)
    counted = {one.sample_id: (one.passes, one.accepted, one.emitted) for one in served.prompts}
    assert counted == {"a": (5, 3, 8), "b": (1, 1, 2)}
    assert (served.answers, served.passes, served.tokens) == (3, 6, 13)


def test_each_answer_is_told_as_it_comes():
    told: list[SpeculatedAnswer] = []
    answers = [served_as([2]), served_as([1, 1]), served_as([0])]
    asked = [ServerPrompt(str(number), (number,), (), 9) for number in range(3)]
    ask_server(asked, lambda question: answers[int(question.sample_id)], 2, told.append)
    assert sorted(map(id, told)) == sorted(map(id, answers))


def test_answers_that_are_the_eval_sets_own_are_told():
    asked = [ServerPrompt("a", (9,), tuple(range(4)), 9), ServerPrompt("b", (9,), (7, 8), 9)]
    served = ask_server(asked, lambda _: served_as([2]), concurrency=2)
    assert (served.answers, served.identical_answers) == (2, 1)


def test_an_error_of_the_server_ends_the_questions_and_waits_for_no_answer():
    asked, released = [], threading.Event()

    def fails(question: ServerPrompt) -> SpeculatedAnswer:
        asked.append(question)
        if len(asked) > 1:
            released.wait(HANG_S)
        raise RuntimeError("gone")

    try:
        with pytest.raises(RuntimeError, match="gone"):
            ask_server([ServerPrompt("a", (1,), (2,), 3)] * 50, fails, concurrency=2)
        assert len(asked) <= 3
    finally:
        released.set()


def acceptance(name: str, passes: list[int]) -> PromptAcceptance:
    return PromptAcceptance.from_accepted_counts(name, passes, sum(passes) + len(passes))


WALK = [acceptance(name, [1, 2, 0, 3, 1]) for name in "abcdef"]


def test_a_server_that_does_what_the_walk_said_agrees_count_for_count():
    compared = compare_with_walk(WALK[:4], WALK, tolerance=0.0, resampling=RESAMPLING)
    assert (compared.paired.difference, compared.equal_samples, compared.agrees) == (0, 4, True)
    assert compared.to_json()["only_walked"] == 2


def test_a_server_that_accepts_next_to_nothing_does_not_agree():
    compared = compare_with_walk([acceptance(one.sample_id, [0] * 12) for one in WALK], WALK, 0.05, RESAMPLING)
    assert compared.paired.difference == pytest.approx(-1.4)
    assert (compared.equal_samples, compared.agrees) == (0, False)


def test_a_small_difference_is_none_and_neither_is_one_that_may_be_chance():
    nearly = [acceptance(one.sample_id, [1, 2, 0, 3, 1, 1, 2, 0, 3, 2]) for one in WALK]
    assert not compare_with_walk(nearly, WALK, 0.0, RESAMPLING).agrees
    assert compare_with_walk(nearly, WALK, 0.05, RESAMPLING).agrees
    mixed = [acceptance(one.sample_id, [1, 2, 0, 3, 1 + (-1) ** index]) for index, one in enumerate(WALK)]
    assert compare_with_walk(mixed, WALK, 0.0, RESAMPLING).agrees
