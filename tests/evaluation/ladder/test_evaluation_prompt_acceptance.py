"""Counts of acceptance by prompt and by place in the text, and the first difference of two answers."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_evaluation_replay import Scripted

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import (
    AnswerTrace,
    Difference,
    Pass,
    PromptAcceptance,
    describe_range,
    find_range_begin,
    first_difference,
    join_samples,
    macro_mean,
    micro_mean,
    sum_histograms,
)
from draftworks.evaluation.ladder.replay import replay
from draftworks.features.contracts import TrainBatch

EASY = PromptAcceptance.from_accepted_counts("easy", [3, 3, 2], emitted=11)
HARD = PromptAcceptance.from_accepted_counts("hard", [0, 0, 1, 0, 0, 1], emitted=8)
WITHOUT_A_PASS = PromptAcceptance.from_accepted_counts("empty", [], emitted=0)

accepted_lengths = st.lists(st.integers(0, 7), max_size=20)


def test_passes_are_counted_into_a_histogram() -> None:
    assert PromptAcceptance("easy", passes=3, accepted=8, emitted=11, histogram=(0, 0, 1, 2)) == EASY
    assert PromptAcceptance("empty", passes=0, accepted=0, emitted=0, histogram=()) == WITHOUT_A_PASS


def test_micro_mean_weighs_passes_and_macro_mean_prompts() -> None:
    assert micro_mean([EASY, HARD]) == (8 + 2) / (3 + 6)
    assert macro_mean([EASY, HARD]) == pytest.approx((8 / 3 + 2 / 6) / 2)


def test_prompts_that_accepted_nothing_count() -> None:
    useless = PromptAcceptance.from_accepted_counts("useless", [0, 0], emitted=2)
    assert micro_mean([EASY, useless]) == 8 / 5
    assert macro_mean([EASY, useless]) == pytest.approx(8 / 3 / 2)


@pytest.mark.parametrize("mean", [micro_mean, macro_mean])
def test_prompts_without_a_pass_do_not_move_a_mean(mean) -> None:
    assert mean([EASY, WITHOUT_A_PASS, HARD]) == mean([EASY, HARD])


@pytest.mark.parametrize("mean", [micro_mean, macro_mean])
@pytest.mark.parametrize("prompts", [[], [WITHOUT_A_PASS]])
def test_mean_of_nothing_is_not_a_number(mean, prompts) -> None:
    assert mean(prompts) is None


def test_histogram_adds_prompts_and_is_as_long_as_the_longest() -> None:
    assert sum_histograms([EASY, HARD, WITHOUT_A_PASS]) == (4, 2, 1, 2)
    assert sum_histograms([]) == ()


@given(st.lists(accepted_lengths, max_size=8))
def test_histogram_counts_every_pass_and_every_accepted_token(samples: list[list[int]]) -> None:
    prompts = [
        PromptAcceptance.from_accepted_counts(f"s{index}", accepted, 0) for index, accepted in enumerate(samples)
    ]
    total = sum_histograms(prompts)
    assert sum(total) == sum(len(accepted) for accepted in samples)
    assert sum(length * count for length, count in enumerate(total)) == sum(map(sum, samples))
    assert total == PromptAcceptance.from_accepted_counts("all", sum(samples, []), 0).histogram


@pytest.mark.parametrize("wrong", [{"passes": 4}, {"accepted": 7}, {"histogram": (0, 1, 0, 2)}, {"histogram": ()}])
def test_counts_that_contradict_the_histogram_are_refused(wrong: dict) -> None:
    with pytest.raises(DataError, match="sample easy: expected the .* passes and .* accepted tokens of its histogram"):
        dataclasses.replace(EASY, **wrong)


@pytest.mark.parametrize("wrong", [{"emitted": -1}, {"histogram": (1, -1, 0, 3)}])
def test_negative_counts_are_refused(wrong: dict) -> None:
    with pytest.raises(DataError, match="sample easy: expected counts of 0 or more"):
        dataclasses.replace(EASY, **wrong)


@pytest.mark.parametrize(
    ("place", "begin", "name"),
    [
        (0, 0, "0-255"),
        (255, 0, "0-255"),
        (256, 256, "256-511"),
        (511, 256, "256-511"),
        (512, 512, "512-1023"),
        (32767, 16384, "16384-32767"),
        (32768, 32768, "32768-65535"),
    ],
)
def test_a_range_begins_where_the_one_before_ends(place: int, begin: int, name: str):
    assert find_range_begin(place) == begin
    assert describe_range(begin) == name


def test_of_a_draft_that_is_right_early_only_every_range_has_its_own_passes():
    """Right up to the proposal after position 509, that is from place 511 on nothing is accepted."""
    length, prompt = 1100, 200
    ids = torch.arange(length)
    padded = torch.cat([ids, ids.new_full((5,), -9)])
    proposals = torch.stack([padded[row + 2 : row + 5] for row in range(length)])
    proposals[509:] = -7
    batch = TrainBatch({"input_ids": ids[None], "loss_mask": (ids >= prompt)[None]}, ("s",), length)
    [found] = replay(Scripted(proposals[None]), batch, 3)
    parts = found.walk_by_position
    assert list(parts) == [0, 256, 512, 1024]
    # Passes of four tokens begin at places 201, 205, …, 509; then one by one, the last one at 1099.
    assert [one.passes for one in parts.values()] == [14, 64, 511, 76]
    assert [one.accepted for one in parts.values()] == [14 * 3, 64 * 3, 0, 0]
    for name in ("passes", "accepted", "emitted"):
        assert sum(getattr(one, name) for one in parts.values()) == getattr(found.walk, name)
    joined = join_samples([{256: parts[256]}, parts])
    assert joined == {0: (parts[0],), 256: (parts[256],) * 2, 512: (parts[512],), 1024: (parts[1024],)}


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
