"""Rungs 2 and 3 count what a server would accept, compared with a server's arithmetic token by token.
Rung 6: the acceptance of a live server is counted as the walk counts, and compared with the walk.
Counts of acceptance by prompt and by place in the text, and the first difference of two answers.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from waiting import HANG_S

from draftworks.data.tokenized import TokenRow
from draftworks.errors import DataError
from draftworks.evaluation.ladder.decoding import DecodingLimits
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
from draftworks.evaluation.ladder.server_acceptance import (
    ServerPrompt,
    ask_server,
    build_server_prompts,
    compare_with_rung,
)
from draftworks.evaluation.ladder.statistics import Resampling
from draftworks.features.contracts import TrainBatch
from draftworks.servers.client import SpeculatedAnswer


@dataclass(frozen=True)
class Scripted:
    """A draft with a fixed proposal for every position."""

    proposals: Tensor

    def propose(self, batch: TrainBatch, position_mask: Tensor, count: int) -> Tensor:
        return self.proposals[:, :, :count].masked_fill(~position_mask[..., None], -1)


class Counted(NamedTuple):
    passes: int
    accepted: int
    emitted: int


def counted(found: PromptAcceptance) -> Counted:
    return Counted(found.passes, found.accepted, found.emitted)


def answers_of(mask: list[int]) -> list[range]:
    """Return the positions of every run of answer tokens."""
    found, begin = [], None
    for place, on in enumerate([*mask, 0]):
        if on and begin is None:
            begin = place
        elif not on and begin is not None:
            found.append(range(begin, place))
            begin = None
    return found


def served(ids: list[int], answer: range, proposals: list[list[int]], known: int) -> Counted:
    """One pass of a server that has decided all tokens up to position `known`; the draft is asked at the one before."""
    proposed, accepted = proposals[max(known - 1, 0)], 0
    while accepted < len(proposed) and known + 1 + accepted < answer.stop:
        if proposed[accepted] != ids[known + 1 + accepted]:
            break
        accepted += 1
    left = answer.stop - known - 1
    return Counted(1, accepted, min(accepted + 1, left))


def total(passes: list[Counted]) -> Counted:
    return Counted(*(sum(each) for each in zip(*passes))) if passes else Counted(0, 0, 0)


def by_hand(ids: list[int], mask: list[int], proposals: list[list[int]]) -> tuple[Counted, Counted]:
    """Return the passes of one sample: at every token of its answers but the last, and those of a server."""
    blocks, walk = [], []
    for answer in answers_of(mask):
        first = max(answer.start, 1)  # nothing can be said before there is a row
        blocks += [served(ids, answer, proposals, known) for known in range(first, answer.stop - 1)]
        known = first
        while known < answer.stop - 1:
            walk.append(served(ids, answer, proposals, known))
            known += walk[-1].accepted + 1
    return total(blocks), total(walk)


def replayed(ids: list[int], mask: list[int], proposals: list[list[int]]) -> tuple[Counted, Counted]:
    tensors = {"input_ids": torch.tensor([ids]), "loss_mask": torch.tensor([mask], dtype=torch.bool)}
    batch = TrainBatch(tensors, ("s",), len(ids))
    [found] = replay(Scripted(torch.tensor([proposals])), batch, len(proposals[0]))
    return counted(found.blocks), counted(found.walk)


def test_of_a_perfect_draft_every_answer_is_walked_by_itself_and_nothing_after_its_end_counts():
    ids, mask = [7, 1, 2, 3, 9, 9, 4, 5, 6, 8], [0, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    padded = [*ids, 0, 0, 0, 0]
    perfect = [padded[row + 2 : row + 5] for row in range(len(ids))]  # also of what the user says next
    blocks, walk = replayed(ids, mask, perfect)
    # After 1: 2 3 and not the 9 that follows. After 2: 3. After 4: 5 6 8. After 5: 6 8. After 6: 8.
    assert blocks == Counted(passes=5, accepted=2 + 1 + 3 + 2 + 1, emitted=2 + 1 + 3 + 2 + 1)
    assert walk == Counted(passes=2, accepted=2 + 3, emitted=2 + 3)


token = st.integers(0, 2)
texts = st.integers(1, 14).flatmap(
    lambda length: st.tuples(
        st.lists(token, min_size=length, max_size=length),
        st.lists(st.sampled_from([0, 1, 1, 1]), min_size=length, max_size=length),
        st.lists(st.lists(token, min_size=3, max_size=3), min_size=length, max_size=length),
    )
)


@given(text=texts)
def test_counts_are_those_of_a_server_pass_by_pass(text):
    assert replayed(*text) == by_hand(*text)


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


WALKED = [acceptance(name, [1, 2, 0, 3, 1]) for name in "abcdef"]


def test_a_server_that_does_what_the_walk_said_agrees_count_for_count():
    compared = compare_with_rung(WALKED[:4], WALKED, tolerance=0.0, resampling=RESAMPLING)
    assert (compared.paired.difference, compared.equal_samples, compared.agrees) == (0, 4, True)
    assert compared.to_json()["only_walked"] == 2


def test_a_server_that_accepts_next_to_nothing_does_not_agree():
    compared = compare_with_rung([acceptance(one.sample_id, [0] * 12) for one in WALKED], WALKED, 0.05, RESAMPLING)
    assert compared.paired.difference == pytest.approx(-1.4)
    assert (compared.equal_samples, compared.agrees) == (0, False)


def test_a_small_difference_is_none_and_neither_is_one_that_may_be_chance():
    nearly = [acceptance(one.sample_id, [1, 2, 0, 3, 1, 1, 2, 0, 3, 2]) for one in WALKED]
    assert not compare_with_rung(nearly, WALKED, 0.0, RESAMPLING).agrees
    assert compare_with_rung(nearly, WALKED, 0.05, RESAMPLING).agrees
    mixed = [acceptance(one.sample_id, [1, 2, 0, 3, 1 + (-1) ** index]) for index, one in enumerate(WALKED)]
    assert compare_with_rung(mixed, WALKED, 0.0, RESAMPLING).agrees


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
