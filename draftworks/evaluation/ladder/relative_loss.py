"""Whether a change of how drafts are trained costs acceptance: a relative loss with its bounds, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, sqrt
from typing import Any, Literal

import numpy as np

from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceRatio,
    Resampling,
    compute_student_quantile,
    drop_rounding,
    find_interval,
    select_measured,
)

Verdict = Literal["passed", "refused", "undecided"]


@dataclass(frozen=True)
class SeedPair:
    """The walks of two drafts that were trained alike, with one seed: without the change, and with it."""

    without: Sequence[PromptAcceptance]
    with_change: Sequence[PromptAcceptance]


@dataclass(frozen=True)
class RelativeLoss:
    """The relative loss of accepted tokens per pass: 1 - with / without, averaged over the seeds.

    Attributes:
        loss: negative where the change is a gain; None where a draft without the change accepts nothing.
        low, high: bounds at the level `confidence`.
        by_seed: the loss with each seed.
        prompts: number of prompts that all drafts were measured on.
        more: by how much prompts and seeds have to be multiplied until a loss as found would pass; None unless undecided.
    """

    verdict: Verdict
    loss: float | None
    low: float | None
    high: float | None
    confidence: float
    by_seed: tuple[float, ...]
    prompts: int
    max_loss: float
    more: float | None = None

    def describe(self) -> str:
        if self.loss is None or self.low is None or self.high is None:
            return f"{self.verdict}: drafts that are trained without the change accept nothing, so there is nothing to lose"
        figures = (
            f"relative loss of the walk {self.loss:+.2%} ({self.low:+.2%} to {self.high:+.2%} at {self.confidence:.0%}) on "
            f"{self.prompts} prompts with {len(self.by_seed)} seeds, allowed {self.max_loss:.2%}"
        )
        if self.low == self.high:
            return f"{self.verdict}: {figures}: the same on every prompt, so nothing shows what it is on others"
        if self.more is None:
            return f"{self.verdict}: {figures}"
        prompts, seeds = ceil(self.prompts * self.more), ceil(len(self.by_seed) * self.more)
        return f"{self.verdict}: {figures}. About {prompts:,} prompts and {seeds} seeds would decide"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "by_seed": list(self.by_seed)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RelativeLoss:
        return cls(**{**found, "by_seed": tuple(found["by_seed"])})

    def judge_by(self, max_loss: float) -> RelativeLoss:
        """Return the verdict of the same figures with another limit."""
        if self.loss is None or self.high is None or self.low == self.high:
            return replace(self, verdict="undecided", max_loss=max_loss, more=None)
        verdict: Verdict = "passed" if self.high <= max_loss else "refused" if self.loss >= max_loss else "undecided"
        more = ((self.high - self.loss) / (max_loss - self.loss)) ** 2 if verdict == "undecided" else None
        return replace(self, verdict=verdict, max_loss=max_loss, more=more)


def judge_relative_loss(
    pairs: Sequence[SeedPair], max_loss: float, resampling: Resampling = DEFAULT_RESAMPLING
) -> RelativeLoss:
    """Judge a change by the walks of drafts trained without and with it.

    Passed: the upper bound is at most `max_loss`. Refused: the loss itself is above it, so that more data would not make it
    pass unless the loss is another. Undecided: the loss is not above it, and its upper bound is.

    The variance is the sum of two: that of the prompts, which are the same for all drafts; and that of the seeds, the
    variance between their losses over their number, which has some of the prompts' in it too. The bounds are Student's with
    the degrees of freedom of Welch and Satterthwaite, so that two seeds that disagree say little; they are nowhere narrower
    than those of the prompts alone, see `find_interval`. With one seed only the prompts' variance is known. Both shrink as 1
    over the number, which is where `more` comes from. Prompts that are all alike say nothing, and nothing is decided.

    Raises:
        DataError: no pair, or no prompt that was measured with all drafts.
    """
    if not pairs:
        raise DataError("expected the walks of drafts of one seed or more, found none")
    measured = [(select_measured(pair.without), select_measured(pair.with_change)) for pair in pairs]
    shared = sorted(set.intersection(*(set(one) for both in measured for one in both)))
    if not shared:
        raise DataError("expected prompts that were measured with all drafts, found none: evaluate on one eval set")
    ratios = [[AcceptanceRatio.of([one[name] for name in shared]) for one in both] for both in measured]
    if not all(without.value > 0 for without, _ in ratios):
        return RelativeLoss("undecided", None, None, None, resampling.confidence, (), len(shared), max_loss)
    by_seed = np.array([1 - changed.value / without.value for without, changed in ratios])
    loss = float(by_seed.mean())
    influences = np.mean([_find_influences(*both) for both in ratios], axis=0)
    of_prompts = find_interval(loss, [influences], resampling)
    width = _find_student_width(by_seed, influences, resampling.confidence)
    low, high = min(of_prompts.low, loss - width), max(of_prompts.high, loss + width)
    seeds = tuple(by_seed.tolist())
    found = RelativeLoss("undecided", loss, low, high, resampling.confidence, seeds, len(shared), max_loss)
    return found.judge_by(max_loss)


def _find_influences(without: AcceptanceRatio, changed: AcceptanceRatio) -> np.ndarray:
    """Return the influences of the prompts on 1 - changed / without."""
    kept = changed.value / without.value
    return drop_rounding((kept * without.influences - changed.influences) / without.value, kept + 1)


def _find_student_width(by_seed: np.ndarray, influences: np.ndarray, confidence: float) -> float:
    """Return half the width of the interval that has the variance of prompts and of seeds; 0 where there is none."""
    prompts, seeds = len(influences), len(by_seed)
    between = float(by_seed.var(ddof=1)) / seeds if seeds > 1 else 0.0
    of_prompts = float(influences.var(ddof=1)) / prompts if prompts > 1 else 0.0
    freedom = of_prompts**2 / max(prompts - 1, 1) + between**2 / max(seeds - 1, 1)
    if not freedom:
        return 0.0
    variance = of_prompts + between
    return compute_student_quantile((1 + confidence) / 2, variance**2 / freedom) * sqrt(variance)
