"""Acceptance counts per prompt and by the place in the text, their averages, and the first difference of two answers.

Counts are summed before any division. All rungs that count passes (2, 3, 4 and 6) use them; a published number always names
its rung.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from draftworks.errors import DataError


@dataclass(frozen=True)
class Pass:
    """Result of one pass of the target over a proposal.

    Attributes:
        accepted: number of draft tokens accepted.
        emitted: number of tokens added to the answer: the accepted ones and the target's own.
        rejected_token: the first rejected draft token; None if all were accepted or the answer had ended.
    """

    accepted: int
    emitted: int
    rejected_token: int | None = None


@dataclass(frozen=True)
class PromptAcceptance:
    """Acceptance counts of one draft on one prompt.

    Attributes:
        passes: passes of the target, each over one proposal: at every position on rung 2, as in serving on 3, 4 and 6.
        accepted: draft tokens accepted in these passes.
        emitted: tokens added to the answer in these passes: the accepted ones and the target's own.
        histogram: entry n is the number of passes that accepted exactly n draft tokens.
    """

    sample_id: str
    passes: int
    accepted: int
    emitted: int
    histogram: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.passes, self.accepted, self.emitted, *self.histogram) < 0:
            raise DataError(f"sample {self.sample_id}: expected counts of 0 or more, found {self}")
        passes, accepted = sum(self.histogram), sum(length * count for length, count in enumerate(self.histogram))
        if (self.passes, self.accepted) != (passes, accepted):
            raise DataError(
                f"sample {self.sample_id}: expected the {passes} passes and {accepted} accepted tokens of its histogram"
                f" {self.histogram}, found {self.passes} and {self.accepted}: some passes are lost or counted twice"
            )

    @classmethod
    def of(cls, sample_id: str, passes: Sequence[Pass]) -> PromptAcceptance:
        return cls.from_accepted_counts(sample_id, [one.accepted for one in passes], sum(one.emitted for one in passes))

    @classmethod
    def from_accepted_counts(cls, sample_id: str, accepted: Sequence[int], emitted: int) -> PromptAcceptance:
        """Make the counts from the number of accepted draft tokens of each pass."""
        counts = Counter(accepted)
        lengths = range(max(counts, default=-1) + 1)
        return cls(sample_id, len(accepted), sum(accepted), emitted, tuple(counts[length] for length in lengths))


def micro_mean(prompts: Iterable[PromptAcceptance]) -> float | None:
    """Return accepted tokens per pass, averaged over all passes; None without a pass."""
    prompts = list(prompts)
    return ratio(sum(prompt.accepted for prompt in prompts), sum(prompt.passes for prompt in prompts))


def macro_mean(prompts: Iterable[PromptAcceptance]) -> float | None:
    """Return the mean over prompts of their accepted tokens per pass; None without a pass."""
    means = [prompt.accepted / prompt.passes for prompt in prompts if prompt.passes]
    return ratio(math.fsum(means), len(means))


def sum_histograms(prompts: Iterable[PromptAcceptance]) -> tuple[int, ...]:
    """Return the sum of the prompts' histograms, as long as the longest of them."""
    return tuple(map(sum, zip_longest(*(prompt.histogram for prompt in prompts), fillvalue=0)))


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the quotient, or None if the denominator is 0."""
    return numerator / denominator if denominator else None


FIRST_EDGE = 256
"""End of the first range."""

PromptsByPosition = Mapping[int, tuple[PromptAcceptance, ...]]
"""From the begin of a range to the prompts with a pass in it, each with its passes there alone."""


@dataclass(frozen=True)
class PlacedPass:
    """A pass, and the place in the sample of the first token that it proposed, counted from 0."""

    place: int
    result: Pass


def find_range_begin(place: int) -> int:
    """Return the begin of the range that a place is in: 0, 256, 512, 1024, …"""
    return 0 if place < FIRST_EDGE else 1 << (place.bit_length() - 1)


def describe_range(begin: int) -> str:
    """Return the range that begins there as `256-511`, both included."""
    return f"{begin}-{max(2 * begin, FIRST_EDGE) - 1}"


def split_by_position(sample_id: str, passes: Iterable[PlacedPass]) -> dict[int, PromptAcceptance]:
    """Return the acceptance of one sample in each range that it has a pass in, by the begin of the range."""
    found: dict[int, list[Pass]] = {}
    for one in passes:
        found.setdefault(find_range_begin(one.place), []).append(one.result)
    return {begin: PromptAcceptance.of(sample_id, found[begin]) for begin in sorted(found)}


def join_samples(samples: Iterable[Mapping[int, PromptAcceptance]]) -> dict[int, tuple[PromptAcceptance, ...]]:
    """Return the prompts of every range, ascending, from the ranges of every sample."""
    joined: dict[int, list[PromptAcceptance]] = {}
    for sample in samples:
        for begin, prompt in sample.items():
            joined.setdefault(begin, []).append(prompt)
    return {begin: tuple(joined[begin]) for begin in sorted(joined)}


@dataclass(frozen=True)
class AnswerTrace:
    """One greedy answer of rung 3 or 4: its tokens, and the passes after the prefill, which gives the first token."""

    answer: tuple[int, ...]
    passes: tuple[Pass, ...]

    def to_json(self) -> dict[str, Any]:
        return {"answer": list(self.answer), "passes": [[one.accepted, one.rejected_token] for one in self.passes]}


@dataclass(frozen=True)
class Difference:
    """The first difference between two traces of one answer.

    Attributes:
        whose: `target` if the answers differ; `draft` if the answers are the same and the proposals differ.
        position: index in the answer, from 0, of the token that differs.
        walk, loop: that token on rung 3 and on rung 4; None if the answer had ended.
        pass_number, place: for a draft's difference, the index of the pass and of the proposed token, from 0.
        gap: difference of the two largest logits of `whose` at that token, in the loop; None if it is not known.
    """

    sample_id: str
    whose: Literal["target", "draft"]
    position: int
    walk: int | None
    loop: int | None
    pass_number: int | None = None
    place: int | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        if self.whose not in ("target", "draft"):
            raise DataError(f"sample {self.sample_id}: expected a difference of target or draft, found {self.whose!r}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Difference:
        return cls(**values)


def first_difference(sample_id: str, walk: AnswerTrace, loop: AnswerTrace) -> Difference | None:
    """Return the first difference; None if both traces have the same tokens and the same acceptance in every pass."""
    if walk.answer != loop.answer:
        position = len(os.path.commonprefix([walk.answer, loop.answer]))
        tokens = [trace.answer[position] if position < len(trace.answer) else None for trace in (walk, loop)]
        return Difference(sample_id, "target", position, *tokens)
    before = 1
    for number, (walked, looped) in enumerate(zip(walk.passes, loop.passes)):
        if walked.accepted != looped.accepted:
            place = min(walked.accepted, looped.accepted)
            token = walk.answer[before + place]
            proposed = [token if one.accepted > place else one.rejected_token for one in (walked, looped)]
            return Difference(sample_id, "draft", before + place, *proposed, pass_number=number, place=place)
        before += walked.accepted + 1
    return None
