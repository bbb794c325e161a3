"""What proposes without a model accepts what slow code says that looks for every string again, and cases by hand."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.measurement_cache import MeasurementCache
from draftworks.evaluation.rivals import suffixes
from draftworks.evaluation.rivals.loops import AnswerLoops, measure_repetition
from draftworks.evaluation.rivals.measurement import (
    RivalCache,
    RivalIdentity,
    Rivals,
    RivalSample,
    RivalWalk,
    replay_sample,
)
from draftworks.evaluation.rivals.names import RIVAL_MEANINGS
from draftworks.evaluation.rivals.proposers import LookupProposer, Proposer
from draftworks.evaluation.rivals.suffixes import AnswersText, RequestText, SuffixProposer

Propose = Callable[[list[int], int], Sequence[int]]
"""Tokens of a request so far, and how many to propose."""


def row(ids: Sequence[int], mask: Sequence[int], name: str = "s") -> TokenRow:
    return TokenRow(name, np.array(ids, np.int32), np.array(mask, np.bool_))


def answer_after(prompt: Sequence[int], answer: Sequence[int]) -> TokenRow:
    return row([*prompt, *answer], [0] * len(prompt) + [1] * len(answer))


def look_up_slowly(known: list[int], count: int, sizes: Sequence[int], newest: bool) -> Sequence[int]:
    for size in sizes:
        places = [at for at in range(len(known) - size) if known[at : at + size] == known[-size:]]
        if len(known) > size and places:
            at = (places[-1] if newest else places[0]) + size
            return known[at : at + count]
    return []


def count_string(texts: Sequence[Sequence[int]], string: Sequence[int]) -> int:
    size = len(string)
    return sum(list(text[at : at + size]) == string for text in texts for at in range(len(text) - size + 1))


def follow_suffixes(known: list[int], count: int, texts: Sequence[Sequence[int]]) -> tuple[list[int], float]:
    """The rule of suffix decoding by counting every string in every text anew."""
    best, best_score = [], 0.0
    for length in range(1, 24):
        match = known[-length:]
        if length >= len(known) or not (of_match := count_string(texts, match)):
            break
        proposed, places = [], 0
        while len(proposed) < min(count, length) and length + len(proposed) < 24:
            tokens = sorted({token for text in texts for token in text})
            counts = [count_string(texts, [*match, *proposed, token]) for token in tokens]
            if not counts or max(counts) / of_match < 0.1 or not max(counts):
                break
            proposed.append(tokens[counts.index(max(counts))])
            places += max(counts)
        if places / of_match >= best_score:
            best, best_score = proposed, places / of_match
    return best, best_score


def propose_suffixes_slowly(known: list[int], count: int, answers: Sequence[Sequence[int]] = ()) -> Sequence[int]:
    here, before = follow_suffixes(known, count, [known]), follow_suffixes(known, count, answers)
    return before[0] if before[1] > here[1] else here[0]


def serve(ids: Sequence[int], mask: Sequence[int], propose: Propose, count: int) -> tuple[int, int, int]:
    """Passes, accepted and emitted tokens of a greedy server, one token after the other."""
    passes = accepted = emitted = 0
    ids, known, end = list(ids), 0, 0
    while end < len(ids):
        begin = next((at for at in range(end, len(ids)) if mask[at]), len(ids))
        end = next((at for at in range(begin, len(ids)) if not mask[at]), len(ids))
        known = max(begin, 1) + 1  # the target says an answer's first token in the prefill
        while known < end:
            proposed = list(propose(ids[:known], count))
            while proposed and known < end and proposed[0] == ids[known]:
                accepted, emitted, known = accepted + 1, emitted + 1, known + 1
                proposed.pop(0)
            if known < end:
                emitted, known = emitted + 1, known + 1
            passes += 1
    return passes, accepted, emitted


def counted(found: RivalSample) -> tuple[int, int, int]:
    return found.walk.passes, found.walk.accepted, found.walk.emitted


tokens = st.lists(st.integers(0, 2), max_size=24)
texts = tokens.flatmap(
    lambda ids: st.tuples(st.just(ids), st.lists(st.sampled_from([0, 1, 1, 1]), min_size=len(ids), max_size=len(ids)))
)
depths = st.integers(1, 6)


@given(text=texts, count=depths, newest=st.booleans(), sizes=st.sampled_from([(3, 2, 1), (5,), (2,), (1, 4)]))
def test_lookup_copies_what_slow_search_finds(text, count, newest, sizes):
    found = replay_sample(row(*text), LookupProposer(sizes, newest), count)
    assert counted(found) == serve(*text, lambda known, most: look_up_slowly(known, most, sizes, newest), count)


@given(text=texts, count=depths)
def test_suffixes_of_a_request_are_followed_as_counting_every_string_says(text, count):
    found = replay_sample(row(*text), SuffixProposer(), count)
    assert counted(found) == serve(*text, propose_suffixes_slowly, count)


@given(text=texts, answers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=16), max_size=3), count=depths)
def test_suffixes_of_earlier_answers_are_followed_as_counting_every_string_says(text, answers, count):
    before = AnswersText([np.array(answer, np.int32) for answer in answers])
    found = replay_sample(row(*text), SuffixProposer(before), count)
    expected = serve(*text, lambda known, most: propose_suffixes_slowly(known, most, answers), count)
    assert counted(found) == expected


def test_long_repetitions_match_to_the_greatest_depth_and_no_further():
    cycle = [*range(7), *range(3)] * 5
    mask = [0] * 20 + [1] * (len(cycle) - 20)
    for before in ((), (cycle[:30],), (cycle[:30], [1, 2, 9] * 9)):
        proposer = SuffixProposer(AnswersText([np.array(each, np.int32) for each in before]) if before else None)
        found = replay_sample(row(cycle, mask), proposer, 40)
        assert counted(found) == serve(cycle, mask, partial(propose_suffixes_slowly, answers=before), 40)


@pytest.mark.parametrize(
    ("proposer", "known", "proposed"),
    [
        (LookupProposer((3, 2, 1), newest=True), [1, 2, 3, 8, 1, 2, 3, 9, 7, 1, 2, 3], [9, 7, 1, 2]),
        (LookupProposer((3, 2, 1), newest=True), [4, 2, 3, 8, 5, 3, 9, 1, 2, 3], [8, 5, 3, 9]),  # 3 tokens nowhere
        (LookupProposer((3, 2, 1), newest=True), [6, 6, 6, 6], [6]),  # nothing is known after the end
        (LookupProposer((5,), newest=False), [1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], [8, 1, 2, 3]),
        (LookupProposer((5,), newest=False), [2, 3, 4, 5, 8, 2, 3, 4, 5], []),
        # Of 1 2, four times there, 9 1 has twice 2/4; of 9 1 2, twice there, 9 1 2 has three times 1/2.
        (SuffixProposer(), [1, 2, 8, 1, 2, 9, 1, 2, 9, 1, 2], [9, 1, 2]),
        # Of 1 2, three times there, 8 and 9 have 1/3 each; the lowest is followed.
        (SuffixProposer(), [1, 2, 9, 7, 3, 1, 2, 8, 4, 1, 2], [8, 4]),
        (SuffixProposer(), [1, 2, 3], []),
    ],
)
def test_proposals_by_hand(proposer: Proposer, known: list[int], proposed: list[int]):
    proposer.extend(known[:2])
    proposer.extend(known[2:])
    assert list(proposer.propose(4)) == proposed


def test_earlier_answers_propose_only_where_their_score_is_higher():
    answers = AnswersText([np.array([5, 6, 7, 8], np.int32)])

    def propose(known: list[int]) -> list[int]:
        proposer = SuffixProposer(answers)
        proposer.extend(known)
        return list(proposer.propose(4))

    assert propose([1, 5, 6]) == [7, 8]  # 1 + 1 for a match of two; the request has nothing
    assert propose([6, 1, 6, 1, 6]) == [1, 6]  # 2/2 + 1/2 here (of 6 1 6) beside 1 of the earlier answer
    assert propose([6, 1, 2, 6]) == [7]  # 1/2 here, 1/1 there


def make_rivals(folder: Path, *samples: TokenRow) -> Rivals:
    write_tokens(folder, samples)
    return Rivals.after(TokenizedSet.open(folder), 10)


def test_every_rival_walks_every_sample_and_without_a_draft_a_pass_is_a_token(tmp_path: Path):
    rivals = make_rivals(tmp_path, answer_after([1], [2, 3, 2, 3, 2, 4]))
    samples = [answer_after([5, 2], [3, 2, 3, 2, 3]), row([1, 2], [0, 1], "t")]
    found = rivals.measure(samples, 3)
    assert list(found) == list(RIVAL_MEANINGS)
    assert {name: [one.walk.sample_id for one in walks] for name, walks in found.items()} == dict.fromkeys(
        found, ["s", "t"]
    )
    assert [one.walk.passes for one in found["no_draft"]] == [4, 0]
    assert found["no_draft"][0].walk.histogram == (4,)
    # After 2 comes 3 (twice of three times), after 3 comes 2, so that a chain of three and the target's own are all.
    assert found["bigram"][0].walk == PromptAcceptance("s", 1, 3, 4, (0, 0, 0, 1))
    assert found["bigram"][0].by_position == {0: found["bigram"][0].walk}


@given(seed=st.integers(0, 2**32 - 1))
def test_a_chain_of_bigrams_is_what_most_often_followed(seed):
    rng = np.random.default_rng(seed)
    training, sample = (answer_after(rng.integers(0, 4, 3), rng.integers(0, 4, 30)) for _ in range(2))
    pairs = Counter(zip(training.input_ids.tolist()[2:], training.input_ids.tolist()[3:]))
    common = Counter(training.input_ids.tolist()[3:])

    def follow(known: list[int], count: int) -> list[int]:
        chain = [known[-1]]
        for _ in range(count):
            after = [(-times, second) for (first, second), times in pairs.items() if first == chain[-1]]
            chain.append(min(after)[1] if after else min(common, key=lambda token: (-common[token], token)))
        return chain[1:]

    with tempfile.TemporaryDirectory() as folder:
        [found] = make_rivals(Path(folder), training).measure([sample], 4)["bigram"]
    assert counted(found) == serve(sample.input_ids, sample.loss_mask, follow, 4)


def test_only_the_last_answers_are_kept_within_their_limits(monkeypatch: pytest.MonkeyPatch):
    rows = [row([1, 2, 0, 3, 4], [1, 1, 0, 1, 1], "a"), row([0, 5, 6], [0, 1, 1], "b")]

    def starts(text: AnswersText) -> list[bool]:
        return [text.follow(text.root, token) is not None for token in (1, 3, 5)]

    assert starts(AnswersText.of(rows)) == [True, True, True]
    monkeypatch.setattr(suffixes, "MAX_ANSWERS", 2)
    assert starts(AnswersText.of(rows)) == [False, True, True]
    monkeypatch.setattr(suffixes, "MAX_TOKENS", 3)
    assert starts(AnswersText.of(rows)) == [False, False, True]


def test_a_request_without_repetitions_takes_one_leaf_a_token():
    text = RequestText()
    for token in range(500):
        text.append(token)
    assert text.matches == []
    assert all(type(child).__name__ == "_Leaf" for child in text._root.children.values())


WALK = RivalWalk.of([replay_sample(answer_after([1, 2], [3] * 300), LookupProposer((3, 2, 1), newest=True), 4)])
IDENTITY = RivalIdentity("a", "b", "c", 4)


def test_walks_are_kept_by_what_decides_them(tmp_path: Path):
    cache = RivalCache(MeasurementCache.open(tmp_path / "rivals", "rivals"))
    assert cache.find(IDENTITY).walks is None
    cache.store(IDENTITY, {"lookup": WALK})
    assert cache.find(IDENTITY).walks == {"lookup": WALK}
    assert [*WALK.walk_by_position] == [0, 256]
    for other in (
        RivalIdentity("x", "b", "c", 4),
        RivalIdentity("a", "x", "c", 4),
        RivalIdentity("a", "b", "x", 4),
        RivalIdentity("a", "b", "c", 5),
        RivalIdentity("a", "b", "c", 4, revision=9),
    ):
        assert cache.find(other).walks is None
    path = cache.kept.path(IDENTITY.to_json())
    path.write_text(path.read_text().replace("149", "148"))
    assert cache.find(IDENTITY).walks is None
    assert "is altered" in (cache.find(IDENTITY).problem or "")


def test_repetition_is_the_share_of_ngrams_that_occurred_before():
    assert measure_repetition([[1, 2, 3, 4, 1, 2, 3, 4, 1]]) == pytest.approx(2 / 6)
    assert measure_repetition([[7] * 10, [7] * 5]) == pytest.approx(7 / 9)  # 6 of 7, 1 of 2
    assert measure_repetition([[1, 2, 3]]) == 0
    assert AnswerLoops.of({"a": 0.5, "b": 0.4, "c": 0.0}) == AnswerLoops(3, 1, pytest.approx(0.3))
