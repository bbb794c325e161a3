"""The first difference between two traces of one answer, by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from draftworks.errors import DataError
from draftworks.evaluation.ladder.differences import AnswerTrace, Difference, first_difference
from draftworks.evaluation.ladder.prompt_acceptance import Pass

ANSWER = (10, 11, 12, 13, 14, 15)
WALK = AnswerTrace(ANSWER, (Pass(1, 2, rejected_token=90), Pass(0, 1, rejected_token=91), Pass(2, 2)))


def differing(*passes: Pass, answer: tuple[int, ...] = ANSWER) -> Difference | None:
    return first_difference("s", WALK, AnswerTrace(answer, passes))


def test_same_answer_in_the_same_passes_is_no_difference() -> None:
    assert differing(*WALK.passes) is None


def test_other_tokens_rejected_alike_are_no_difference() -> None:
    """Nothing that was said or counted depends on them."""
    assert differing(Pass(1, 2, rejected_token=70), Pass(0, 1, rejected_token=71), Pass(2, 2)) is None


def test_target_differs_where_the_answers_part_first() -> None:
    found = differing(*WALK.passes, answer=(10, 11, 12, 88, 14, 99))
    assert found == Difference("s", "target", 3, walk=13, loop=88)


@pytest.mark.parametrize(("answer", "walk", "loop"), [(ANSWER[:4], 14, None), ((*ANSWER[:4], 14, 15, 16), None, 16)])
def test_answer_that_goes_on_where_the_other_ends_is_a_difference(
    answer: tuple[int, ...], walk: int | None, loop: int | None
) -> None:
    found = differing(*WALK.passes, answer=answer)
    assert found == Difference("s", "target", min(len(answer), len(ANSWER)), walk, loop)


def test_draft_that_was_accepted_for_longer_in_the_walk() -> None:
    """Pass 0 proposes for tokens 1, 2, …: the walk accepted token 1, the loop was offered another."""
    found = differing(Pass(0, 1, rejected_token=77), Pass(1, 2, rejected_token=90), Pass(0, 1), Pass(1, 1))
    assert found == Difference("s", "draft", 1, walk=11, loop=77, pass_number=0, place=0)


def test_draft_that_was_accepted_for_longer_in_the_loop() -> None:
    """Pass 1 proposes for tokens 3, 4, …: the walk's proposal 91 was refused, the loop's was the answer's."""
    found = differing(Pass(1, 2, rejected_token=90), Pass(2, 3))
    assert found == Difference("s", "draft", 3, walk=91, loop=13, pass_number=1, place=0)


def test_only_the_place_of_the_first_rejection_counts() -> None:
    walk = AnswerTrace(ANSWER, (Pass(3, 4, rejected_token=92), Pass(0, 1)))
    loop = AnswerTrace(ANSWER, (Pass(2, 3, rejected_token=70), Pass(1, 2)))
    assert first_difference("s", walk, loop) == Difference("s", "draft", 3, 13, 70, pass_number=0, place=2)


def test_differences_survive_json_and_belong_to_target_or_draft() -> None:
    found = differing(Pass(0, 1, rejected_token=77))
    assert Difference.from_json(asdict(found)) == found
    with pytest.raises(DataError, match="expected a difference of target or draft, found 'nobody'"):
        Difference.from_json({**asdict(found), "whose": "nobody"})
