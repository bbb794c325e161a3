"""Intervals of acceptance, the paired comparison of two drafts, the summary of one.

The observations are prompts, not passes: passes of one prompt resemble each other, so that intervals over passes would be
far too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import (
    PromptAcceptance,
    macro_mean,
    micro_mean,
    ratio,
    sum_histograms,
)
from draftworks.evaluation.ladder.statistics.intervals import Tested, drop_rounding, examine_difference, find_interval
from draftworks.evaluation.ladder.statistics.resampling import DEFAULT_RESAMPLING, Interval, Resampling


@dataclass(frozen=True)
class PairedDifference:
    """Difference in acceptance of draft a over draft b, on the prompts that were measured with both.

    Attributes:
        difference: a's accepted tokens per pass minus b's.
        prompts: number of prompts measured with both.
        only_in_a, only_in_b: number of prompts measured with one of them, which are left out.
    """

    difference: float
    interval: Interval
    prompts: int
    only_in_a: int
    only_in_b: int


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance of one draft on one set of prompts. A ratio over no passes is None.

    Attributes:
        prompts: number of all prompts; those without a pass are in no average.
        micro: accepted tokens per pass over all passes.
        low, high: interval of `micro` at the level `confidence`.
        macro: mean over prompts of their accepted tokens per pass.
        tokens_per_pass: emitted tokens per pass.
    """

    prompts: int
    passes: int
    accepted: int
    emitted: int
    micro: float | None
    macro: float | None
    low: float | None
    high: float | None
    confidence: float
    histogram: tuple[int, ...]
    tokens_per_pass: float | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "histogram": list(self.histogram)}


def bootstrap_interval(
    prompts: Iterable[PromptAcceptance], resampling: Resampling = DEFAULT_RESAMPLING
) -> Interval | None:
    """Return the interval of accepted tokens per pass, over prompts; see `find_interval`. It does not end below 0.

    It does not depend on the order of the prompts. Over one prompt, or prompts that are all alike, its width is 0, which
    does not mean certainty.

    Returns:
        None without a pass.
    """
    measured = list(select_measured(prompts).values())
    if not measured:
        return None
    found = AcceptanceRatio.of(measured)
    interval = find_interval(found.value, [found.influences], resampling)
    return replace(interval, low=max(interval.low, 0.0))


def paired_difference(
    a: Iterable[PromptAcceptance],
    b: Iterable[PromptAcceptance],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> PairedDifference:
    """Compare the accepted tokens per pass of drafts a and b on the prompts of both.

    Prompts that are easy for both drafts cancel out, so the interval is narrower than those of the two drafts.

    Raises:
        DataError: no prompt was measured with both.
    """
    of_a, of_b = select_measured(a), select_measured(b)
    shared = [sample_id for sample_id in of_a if sample_id in of_b]
    if not shared:
        raise DataError(
            f"two drafts to compare: expected prompts measured with both, found none among {len(of_a)} and {len(of_b)}:"
            " evaluate both on the same eval set"
        )
    found = subtract_paired(*([draft[sample_id] for sample_id in shared] for draft in (of_a, of_b)))
    interval = find_interval(found.value, [found.influences], resampling)
    return PairedDifference(found.value, interval, len(shared), len(of_a) - len(shared), len(of_b) - len(shared))


def unpaired_difference(
    a: Iterable[PromptAcceptance],
    b: Iterable[PromptAcceptance],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> Interval | None:
    """Return the interval of the difference in accepted tokens per pass of drafts a and b on different prompts.

    The prompts of each are samples of their own, so the interval is wider than a paired one, and says nothing of how much
    of the difference is that of the prompts. None if one of the drafts has no pass.
    """
    of_a, of_b = (list(select_measured(one).values()) for one in (a, b))
    return examine_unpaired(of_a, of_b, resampling).interval if of_a and of_b else None


def examine_paired(
    a: Sequence[PromptAcceptance], b: Sequence[PromptAcceptance], resampling: Resampling = DEFAULT_RESAMPLING
) -> Tested:
    """Return interval and p-value of the difference of a minus b: the same prompts with a pass, in the same order."""
    found = subtract_paired(a, b)
    return examine_difference(found.value, [found.influences], resampling)


def examine_unpaired(
    a: Sequence[PromptAcceptance], b: Sequence[PromptAcceptance], resampling: Resampling = DEFAULT_RESAMPLING
) -> Tested:
    """Return interval and p-value of the difference of a minus b, on prompts of their own, each with a pass."""
    of_a, of_b = AcceptanceRatio.of(a), AcceptanceRatio.of(b)
    return examine_difference(of_a.value - of_b.value, [of_a.influences, -of_b.influences], resampling)


@dataclass(frozen=True)
class AcceptanceRatio:
    """Accepted tokens per pass, or a difference of two, with the influence of each prompt on it, (prompts,).

    The prompt's influence on the ratio of sums A / P is (a - A / P p) over the mean of p.
    """

    value: float
    influences: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[PromptAcceptance]) -> AcceptanceRatio:
        """Return the ratio over prompts with a pass, of which there is at least one."""
        return cls.of_counts(
            np.array([prompt.accepted for prompt in prompts], dtype=np.float64),
            np.array([prompt.passes for prompt in prompts], dtype=np.float64),
        )

    @classmethod
    def of_counts(cls, accepted: np.ndarray, passes: np.ndarray) -> AcceptanceRatio:
        """Return the ratio of the sums of counts, (observations,) each."""
        value = float(accepted.sum() / passes.sum())
        return cls(value, drop_rounding((accepted - value * passes) / passes.mean(), value + 1))


def subtract_paired(a: Sequence[PromptAcceptance], b: Sequence[PromptAcceptance]) -> AcceptanceRatio:
    """Return a minus b over the same prompts in the same order. Prompts that are easy for both cancel out."""
    of_a, of_b = AcceptanceRatio.of(a), AcceptanceRatio.of(b)
    return AcceptanceRatio(
        of_a.value - of_b.value, drop_rounding(of_a.influences - of_b.influences, of_a.value + of_b.value + 1)
    )


def summarize_acceptance(
    prompts: Iterable[PromptAcceptance], resampling: Resampling = DEFAULT_RESAMPLING
) -> AcceptanceSummary:
    """Return the averages, counts and the interval of one draft on these prompts."""
    prompts = list(prompts)
    interval = bootstrap_interval(prompts, resampling)
    passes, emitted = sum(prompt.passes for prompt in prompts), sum(prompt.emitted for prompt in prompts)
    return AcceptanceSummary(
        prompts=len(prompts),
        passes=passes,
        accepted=sum(prompt.accepted for prompt in prompts),
        emitted=emitted,
        micro=micro_mean(prompts),
        macro=macro_mean(prompts),
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        confidence=resampling.confidence,
        histogram=sum_histograms(prompts),
        tokens_per_pass=ratio(emitted, passes),
    )


def select_measured(prompts: Iterable[PromptAcceptance]) -> dict[str, PromptAcceptance]:
    """Return the prompts with a pass by sample id, sorted by it."""
    by_id: dict[str, PromptAcceptance] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.sample_id):
        if prompt.sample_id in by_id:
            raise DataError(f"sample {prompt.sample_id}: expected once among the evaluated prompts, found twice")
        by_id[prompt.sample_id] = prompt
    return {sample_id: prompt for sample_id, prompt in by_id.items() if prompt.passes}
