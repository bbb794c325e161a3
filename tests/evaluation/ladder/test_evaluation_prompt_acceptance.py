"""Acceptance counts of one prompt, and averages over prompts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, macro_mean, micro_mean, sum_histograms

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
