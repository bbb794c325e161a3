"""Acceptance counts per prompt, and their averages. Counts are summed before any division.

All rungs that count passes (2, 3, 4 and 6) use them; a published number always names its rung.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

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
