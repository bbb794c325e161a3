"""Whether a draft accepts less late in the text than at its begin, by the ranges of places of its walk."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.evaluation.acceptance_length import SYMBOL, format_length
from draftworks.evaluation.ladder.positions import PromptsByPosition, describe_range
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean
from draftworks.evaluation.ladder.statistics import Interval, Resampling, select_measured, unpaired_difference

LEAST_PROMPTS = 5
"""Prompts of a range below which nothing is said of it: their interval would be too narrow."""
CLEAR_SHARE = 0.75
"""A range that accepts less than this share of the first one's, and whose interval says that it is less, is a fall."""


@dataclass(frozen=True)
class LateFall:
    """A later range in which the draft accepts clearly less than in the first one that was measured.

    Attributes:
        first, late: begins of the two ranges.
        before, after: accepted tokens per pass in them.
        interval: of the difference, after - before. The prompts of the ranges are not the same ones.
    """

    first: int
    late: int
    before: float
    after: float
    interval: Interval

    def describe(self) -> str:
        """Return a sentence on the fall and what helps."""
        return (
            f"**Late in the text the draft accepts less:** {SYMBOL} {format_length(self.after)} at {describe_range(self.late)}, "
            f"{format_length(self.before)} at {describe_range(self.first)} (95% interval of the difference {self.interval.low:+.2f} to {self.interval.high:+.2f}). Train it on samples as long "
            "as what is served (`data.max_length`), or with a `sliding_window`."
        )


def find_late_fall(walk: PromptsByPosition, resampling: Resampling) -> LateFall | None:
    """Return the fall in the last range with enough prompts; None if there is none."""
    known = {begin: prompts for begin, prompts in walk.items() if len(select_measured(prompts)) >= LEAST_PROMPTS}
    if len(known) < 2:
        return None
    first, late = min(known), max(known)
    before, after = micro_mean(known[first]), micro_mean(known[late])
    interval = unpaired_difference(known[late], known[first], resampling)
    if before is None or after is None or interval is None:
        return None
    return (
        LateFall(first, late, before, after, interval) if after < CLEAR_SHARE * before and interval.high < 0 else None
    )
