"""Bootstrap intervals of acceptance, the paired comparison of two drafts, the summary of one.

Prompts are resampled, not passes: passes of one prompt resemble each other, so resampling passes would make the
interval far too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftworks.errors import ConfigError, DataError
from draftworks.evaluation.ladder.prompt_acceptance import (
    PromptAcceptance,
    macro_mean,
    micro_mean,
    ratio,
    sum_histograms,
)

MAX_DRAWS = 2**20  # held at once: 8 MiB each for the drawn indices and for the values at them


@dataclass(frozen=True)
class Resampling:
    """Settings of a bootstrap: confidence level, number of resamples, seed."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence: expected a level between 0 and 1 such as 0.95, found {self.confidence}")
        if self.resamples < 1:
            raise ConfigError(f"resamples: expected 1 or more, found {self.resamples}")


DEFAULT_RESAMPLING = Resampling()


@dataclass(frozen=True)
class Interval:
    """Confidence interval at the level `confidence`."""

    low: float
    high: float
    confidence: float


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
    """Return the percentile bootstrap interval of accepted tokens per pass, over prompts.

    See Efron 1979; Efron & Tibshirani 1993, chapter 13.

    It does not depend on the order of the prompts. Over one prompt its width is 0, which does not mean certainty.

    Returns:
        None without a pass.
    """
    measured = list(select_measured(prompts).values())
    if not measured:
        return None
    [resampled] = resample_means([measured], resampling)
    return _percentiles(resampled, resampling.confidence)


def paired_difference(
    a: Iterable[PromptAcceptance],
    b: Iterable[PromptAcceptance],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> PairedDifference:
    """Compare the accepted tokens per pass of drafts a and b on the prompts of both, which are resampled together.

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
    pairs = [[draft[sample_id] for sample_id in shared] for draft in (of_a, of_b)]
    resampled_a, resampled_b = resample_means(pairs, resampling)
    interval = _percentiles(resampled_a - resampled_b, resampling.confidence)
    mean_a, mean_b = map(micro_mean, pairs)
    assert mean_a is not None, "a measured prompt has a pass"
    assert mean_b is not None
    difference = mean_a - mean_b
    return PairedDifference(difference, interval, len(shared), len(of_a) - len(shared), len(of_b) - len(shared))


def unpaired_difference(
    a: Iterable[PromptAcceptance],
    b: Iterable[PromptAcceptance],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> Interval | None:
    """Return the interval of the difference in accepted tokens per pass of drafts a and b on different prompts.

    The prompts of each are resampled by themselves, so the interval is wider than a paired one, and says nothing of how
    much of the difference is that of the prompts. None if one of the drafts has no pass.
    """
    drafts = [list(select_measured(one).values()) for one in (a, b)]
    if not all(drafts):
        return None
    streams = np.random.SeedSequence(resampling.seed).generate_state(2)
    [of_a], [of_b] = (
        resample_means([prompts], replace(resampling, seed=int(seed))) for prompts, seed in zip(drafts, streams)
    )
    return _percentiles(of_a - of_b, resampling.confidence)


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
    """Return the prompts with a pass by sample id, sorted by it: draws must not depend on the order of the ranks."""
    by_id: dict[str, PromptAcceptance] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.sample_id):
        if prompt.sample_id in by_id:
            raise DataError(f"sample {prompt.sample_id}: expected once among the evaluated prompts, found twice")
        by_id[prompt.sample_id] = prompt
    return {sample_id: prompt for sample_id, prompt in by_id.items() if prompt.passes}


def resample_means(drafts: Sequence[Sequence[PromptAcceptance]], resampling: Resampling) -> np.ndarray:
    """Return accepted tokens per pass on resamples of the prompts, the same for every draft, (drafts, resamples)."""
    accepted = np.array([[prompt.accepted for prompt in prompts] for prompts in drafts], dtype=np.float64)
    passes = np.array([[prompt.passes for prompt in prompts] for prompts in drafts], dtype=np.float64)
    prompts = accepted.shape[1]
    rng = np.random.default_rng(resampling.seed)
    at_once = max(1, MAX_DRAWS // prompts)
    chunks = []
    for start in range(0, resampling.resamples, at_once):
        drawn = rng.integers(prompts, size=(min(at_once, resampling.resamples - start), prompts))
        chunks.append([a[drawn].sum(1) / p[drawn].sum(1) for a, p in zip(accepted, passes)])
    return np.concatenate(chunks, axis=1)


def _percentiles(resampled: np.ndarray, confidence: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), confidence)
