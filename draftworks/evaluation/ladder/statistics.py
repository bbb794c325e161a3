"""All statistics of acceptance: intervals, p-values, Holm's correction, Student's t, the comparison of two drafts. No torch.

The observations are prompts, not passes: passes of one prompt resemble each other, so that intervals over passes would be
far too narrow.

*The interval of an estimate by the influences of its observations* is the wider of two, on each side. An estimate is to
first order a constant plus the mean of a number for each observation, its *influence* (the delta method; Efron & Tibshirani
1993, chapter 21). For the mean of such numbers there are two intervals that err on different data:

* Student's t, which is too narrow where large losses are rare: in most samples there are few of them, or none;
* the Bayesian bootstrap (Rubin 1981), for each end with one observation more on that side, which was not seen: as far
  beyond the most extreme one as that is beyond the third. Where the three are equal that counts the most extreme one once
  more, as Gaffke's bound (2005) counts the smallest possible value; for values of two kinds it is then the exact interval of
  Clopper & Pearson (1934). An outlier that was seen once or twice says that there may be others, further out.

docs/benchmarks.md has how often it covers, and how often the rule of promotion errs by it.

*Of observations that follow each other in time* and resemble their neighbours, blocks take the place of single ones:
circular blocks (Politis and Romano 1992), of about the cube root of their number each. The interval is the wider one, on
each side, of the percentiles of blocks that are drawn and of Student's t with as many observations as there are blocks side
by side, since a few blocks vary too little by themselves.

*Student's distribution* is the only thing that scipy would be needed for, at 35 MB (110 MB unpacked) and a version more to
keep: it is integrated here, to about 5 digits. With x = sqrt(freedom) tan(angle) its density is that of cos(angle) to the
power freedom - 1, which is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import atan, ceil, pi, sqrt
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

MAX_DRAWS = 2**20  # held at once: 8 MiB each for the weights and for the weighted influences
ROUNDING = 1e-12
"""Share of the estimate's parts below which an influence is rounding, and nothing was observed."""
POINTS = 4001
"""Places at which Student's density is integrated."""
REACH = 14.0
"""Standard deviations, of a distribution that is nearly normal, beyond which there is nothing."""
MOST_FREEDOM = 1e6


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

    @property
    def has_width(self) -> bool:
        """Whether it says anything: observations that are all alike, or a single one, do not show how far others lie."""
        return self.high > self.low


def compute_student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution with 1 or more degrees of freedom."""
    freedom = min(max(freedom, 1.0), MOST_FREEDOM)
    angles, cumulative = _integrate(freedom)
    return sqrt(freedom) * float(np.tan(np.interp(probability, cumulative, angles)))


def compute_student_tail(value: float, freedom: float) -> float:
    """Return the probability that Student's t is above a value of 0 or more."""
    freedom = min(max(freedom, 1.0), MOST_FREEDOM)
    angles, cumulative = _integrate(freedom)
    return float(np.interp(-atan(value / sqrt(freedom)), angles, cumulative))


def _integrate(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Return angles and the probability to be below each of them."""
    reach = min(pi / 2, REACH / sqrt(freedom))
    angles = np.linspace(-reach, reach, POINTS)
    density = np.cos(angles).clip(min=0.0) ** (freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angles, cumulative / cumulative[-1]


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjustment of p-values, in their order (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True)
class Tested:
    """An estimate's interval, and the two-sided p-value of 0; the interval at 1 - p ends at 0."""

    interval: Interval
    p_value: float


def find_interval(estimate: float, samples: Sequence[np.ndarray], resampling: Resampling) -> Interval:
    """Return the interval of an estimate; see `examine_difference`."""
    return examine_difference(estimate, samples, resampling).interval


def examine_difference(estimate: float, samples: Sequence[np.ndarray], resampling: Resampling) -> Tested:
    """Return the interval of a difference, and the p-value of no difference.

    The p-value is the larger one of those of the two intervals. That of the bootstrap is at least 2 / (resamples + 1).
    Where every observation is the same difference, it is that of the sign test, and the interval has no width, nor has that
    of a sample of one observation.

    Args:
        samples: influences of the observations, (observations,), for each independent sample. Their order is nothing.
    """
    fewest = min(len(sample) for sample in samples)
    if fewest < 2 or not any(bool(sample.any()) for sample in samples):
        interval = Interval(estimate, estimate, resampling.confidence)
        return Tested(interval, 2.0 ** (1 - fewest) if abs(estimate) > ROUNDING else 1.0)
    spread, drawn = _Spread.of(samples), _draw_means(samples, resampling)
    edge = (1 - resampling.confidence) / 2
    width = compute_student_quantile(1 - edge, spread.freedom) * spread.error
    low, high = float(np.quantile(drawn.lowest, edge)), float(np.quantile(drawn.highest, 1 - edge))
    interval = Interval(estimate + min(low, -width), estimate + max(high, width), resampling.confidence)
    crossing = (drawn.highest + estimate >= 0) if estimate < 0 else (drawn.lowest + estimate <= 0)
    by_bootstrap = 2 * (int(crossing.sum()) + 1) / (len(crossing) + 1)
    by_student = 2 * compute_student_tail(abs(estimate) / spread.error, spread.freedom)
    return Tested(interval, min(1.0, max(by_bootstrap, by_student)))


def drop_rounding(influences: np.ndarray, scale: float) -> np.ndarray:
    """Return influences with 0 for those that are rounding beside `scale`: alike observations have none."""
    return np.where(np.abs(influences) <= ROUNDING * scale, 0.0, influences)


@dataclass(frozen=True)
class _Spread:
    """Standard error of a sum of independent means, and its degrees of freedom (Welch 1947, Satterthwaite 1946)."""

    error: float
    freedom: float

    @classmethod
    def of(cls, samples: Sequence[np.ndarray]) -> _Spread:
        variances = [float(sample.var(ddof=1)) / len(sample) for sample in samples]
        total = sum(variances)
        inverse = sum((part / total) ** 2 / (len(sample) - 1) for part, sample in zip(variances, samples))
        return cls(sqrt(total), 1 / inverse)


@dataclass(frozen=True)
class _DrawnMeans:
    """Means of the influences by random weights, with one more beyond the smallest or the largest, (resamples,)."""

    lowest: np.ndarray
    highest: np.ndarray


def _draw_means(samples: Sequence[np.ndarray], resampling: Resampling) -> _DrawnMeans:
    seeds = [resampling.seed]
    if len(samples) > 1:
        seeds = np.random.SeedSequence(resampling.seed).generate_state(len(samples)).tolist()
    drawn = [_draw_means_of(sample, resampling.resamples, seed) for sample, seed in zip(samples, seeds)]
    return _DrawnMeans(sum(one.lowest for one in drawn), sum(one.highest for one in drawn))  # pyright: ignore[reportArgumentType]


def _draw_means_of(sample: np.ndarray, resamples: int, seed: int) -> _DrawnMeans:
    """Weights are those of Dirichlet(1, ..., 1). Both ends use the same, so that a change of sign exchanges them."""
    ascending = np.sort(sample)
    low, high = _add_unseen(ascending), _add_unseen(ascending[::-1])
    rng = np.random.default_rng(seed)
    at_once = max(1, MAX_DRAWS // len(low))
    lowest, highest = np.empty(resamples), np.empty(resamples)
    for start in range(0, resamples, at_once):
        stop = min(start + at_once, resamples)
        weights = rng.standard_exponential((stop - start, len(low)))
        weights /= weights.sum(axis=1, keepdims=True)
        lowest[start:stop] = (weights * low).sum(axis=1)
        highest[start:stop] = (weights * high).sum(axis=1)
    return _DrawnMeans(lowest, highest)


def _add_unseen(ordered: np.ndarray) -> np.ndarray:
    """Return observations, the most extreme first, with one more before them."""
    return np.concatenate([[2 * ordered[0] - ordered[min(2, len(ordered) - 1)]], ordered])


def find_block_interval(estimate: float, series: Sequence[np.ndarray], resampling: Resampling) -> Interval:
    """Return the interval of an estimate.

    Args:
        series: influences of the observations in their order, (observations,), of each independent series; 4 or more.

    Returns:
        One without width where the observations are all alike.
    """
    blocks = [_Blocks.of(one) for one in series]
    parts = [one.variance for one in blocks]
    if not sum(parts):
        return Interval(estimate, estimate, resampling.confidence)
    edge = (1 - resampling.confidence) / 2
    drawn = np.zeros(resampling.resamples)
    for index, one in enumerate(blocks):
        drawn += one.draw_means(resampling.resamples, resampling.seed + index)
    low, high = np.quantile(drawn, [edge, 1 - edge])
    inverse = sum((part / sum(parts)) ** 2 / (one.count - 1) for part, one in zip(parts, blocks))
    width = compute_student_quantile(1 - edge, 1 / inverse) * sqrt(sum(parts))
    return Interval(estimate + min(float(low), -width), estimate + max(float(high), width), resampling.confidence)


@dataclass(frozen=True)
class _Blocks:
    """Means of the circular blocks that begin at each observation, (observations,).

    Attributes:
        count: number of blocks that cover the series once.
    """

    means: np.ndarray
    count: int

    @classmethod
    def of(cls, series: np.ndarray) -> _Blocks:
        size = len(series)
        length = round(2 * size ** (1 / 3))
        sums = np.cumsum(np.concatenate([[0.0], series, series[: length - 1]]))
        return cls((sums[length:] - sums[:-length]) / length, ceil(size / length))

    @property
    def variance(self) -> float:
        """Variance of the mean of the series, without bias for independent blocks."""
        return float(self.means.var()) / (self.count - 1)

    def draw_means(self, resamples: int, seed: int) -> np.ndarray:
        drawn = np.random.default_rng(seed).integers(len(self.means), size=(resamples, self.count))
        return self.means[drawn].mean(axis=1)


@dataclass(frozen=True)
class AcceptanceDifference:
    """Acceptance of draft a beside that of draft b: paired, on the prompts that were measured with both; or each on its own.

    Attributes:
        a, b: accepted tokens per pass of each, on the prompts that were compared.
        interval: of the difference.
        p_value: two-sided, of no difference; not corrected for other questions.
        prompts: number of prompts measured with both; those of a where they are not paired.
        only_in_a, only_in_b: number of prompts measured with one of them, which are left out of a pair.
    """

    a: float
    b: float
    interval: Interval
    p_value: float
    prompts: int
    only_in_a: int = 0
    only_in_b: int = 0

    @property
    def difference(self) -> float:
        """Accepted tokens per pass of a minus those of b."""
        return self.a - self.b

    def to_json(self) -> dict[str, Any]:
        """Return the values that reports store."""
        counts = {"prompts": self.prompts, "only_in_a": self.only_in_a, "only_in_b": self.only_in_b}
        return {"difference": self.difference, "interval": asdict(self.interval), **counts}


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


def compare_paired(
    a: Iterable[PromptAcceptance], b: Iterable[PromptAcceptance], resampling: Resampling = DEFAULT_RESAMPLING
) -> AcceptanceDifference:
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
    left, right = (AcceptanceRatio.of([draft[sample_id] for sample_id in shared]) for draft in (of_a, of_b))
    influences = drop_rounding(left.influences - right.influences, left.value + right.value + 1)
    tested = examine_difference(left.value - right.value, [influences], resampling)
    lost = (len(of_a) - len(shared), len(of_b) - len(shared))
    return AcceptanceDifference(left.value, right.value, tested.interval, tested.p_value, len(shared), *lost)


def compare_unpaired(
    a: Iterable[PromptAcceptance], b: Iterable[PromptAcceptance], resampling: Resampling = DEFAULT_RESAMPLING
) -> AcceptanceDifference | None:
    """Compare the accepted tokens per pass of drafts a and b on different prompts; None if one of them has no pass.

    The prompts of each are samples of their own, so the interval is wider than a paired one, and says nothing of how much
    of the difference is that of the prompts.
    """
    of_a, of_b = (list(select_measured(one).values()) for one in (a, b))
    if not of_a or not of_b:
        return None
    left, right = AcceptanceRatio.of(of_a), AcceptanceRatio.of(of_b)
    tested = examine_difference(left.value - right.value, [left.influences, -right.influences], resampling)
    return AcceptanceDifference(left.value, right.value, tested.interval, tested.p_value, len(of_a))


@dataclass(frozen=True)
class AcceptanceRatio:
    """Accepted tokens per pass, with the influence of each prompt on it, (prompts,).

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
