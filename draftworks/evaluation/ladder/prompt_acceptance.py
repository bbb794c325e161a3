"""Counts of what the target accepted, prompt by prompt, and their averages. Counts are summed before any ratio.

The same words serve every rung of the ladder that counts; whoever publishes a number says which rung it is.
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
    """What one pass of the target over a proposal gave.

    Attributes:
        accepted, emitted: draft tokens accepted, tokens that came out.
        rejected_token: the draft token at which acceptance ended; None where all stood or the answer was over.
    """

    accepted: int
    emitted: int
    rejected_token: int | None = None


@dataclass(frozen=True)
class PromptAcceptance:
    """What the target accepted of one draft's proposals on one prompt.

    Attributes:
        passes: passes of the target, each verifying one draft: blocks on rung 2, steps of the walk on 3, of the loop on 4.
        accepted: draft tokens accepted over these passes.
        emitted: tokens that came out of them: the accepted ones and the target's own.
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
                f" {self.histogram}, found {self.passes} and {self.accepted}: whoever counted them lost or doubled some"
            )

    @classmethod
    def of(cls, sample_id: str, passes: Sequence[Pass]) -> PromptAcceptance:
        return cls.from_accepted_counts(sample_id, [one.accepted for one in passes], sum(one.emitted for one in passes))

    @classmethod
    def from_accepted_counts(cls, sample_id: str, accepted: Sequence[int], emitted: int) -> PromptAcceptance:
        """Counted from the accepted draft tokens of each pass."""
        counts = Counter(accepted)
        lengths = range(max(counts, default=-1) + 1)
        return cls(sample_id, len(accepted), sum(accepted), emitted, tuple(counts[length] for length in lengths))


def micro_mean(prompts: Iterable[PromptAcceptance]) -> float | None:
    """Accepted tokens per pass, every pass counting the same; None without a pass."""
    prompts = list(prompts)
    return ratio(sum(prompt.accepted for prompt in prompts), sum(prompt.passes for prompt in prompts))


def macro_mean(prompts: Iterable[PromptAcceptance]) -> float | None:
    """Accepted tokens per pass, every prompt that has one counting the same; None without a pass."""
    means = [prompt.accepted / prompt.passes for prompt in prompts if prompt.passes]
    return ratio(math.fsum(means), len(means))


def sum_histograms(prompts: Iterable[PromptAcceptance]) -> tuple[int, ...]:
    """Entry n is the number of passes that accepted exactly n draft tokens; as long as the longest."""
    return tuple(map(sum, zip_longest(*(prompt.histogram for prompt in prompts), fillvalue=0)))


def ratio(numerator: float, denominator: float) -> float | None:
    """None where there is nothing to divide by."""
    return numerator / denominator if denominator else None
