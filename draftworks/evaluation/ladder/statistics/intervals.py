"""The interval of an estimate by the influences of its observations: the wider of two, on each side.

An estimate is to first order a constant plus the mean of a number for each observation, its *influence* (the delta method;
Efron & Tibshirani 1993, chapter 21). For the mean of such numbers there are two intervals that err on different data:

* Student's t, which is too narrow where large losses are rare: in most samples there are few of them, or none;
* the Bayesian bootstrap (Rubin 1981), for each end with one observation more on that side, which was not seen: as far
  beyond the most extreme one as that is beyond the third. Where the three are equal that counts the most extreme one once
  more, as Gaffke's bound (2005) counts the smallest possible value; for values of two kinds it is then the exact interval of
  Clopper & Pearson (1934). An outlier that was seen once or twice says that there may be others, further out.

Each end is that of the wider one. docs/benchmarks.md has how often it covers, and how often the rule of promotion errs by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from draftworks.evaluation.ladder.statistics.resampling import Interval, Resampling
from draftworks.evaluation.ladder.statistics.student import compute_student_quantile, compute_student_tail

MAX_DRAWS = 2**20  # held at once: 8 MiB each for the weights and for the weighted influences
ROUNDING = 1e-12
"""Share of the estimate's parts below which an influence is rounding, and nothing was observed."""


@dataclass(frozen=True)
class Tested:
    """An estimate's interval, and the two-sided p-value of 0; the interval at 1 - p ends at 0."""

    interval: Interval
    p_value: float


def find_interval(estimate: float, samples: Sequence[np.ndarray], resampling: Resampling) -> Interval:
    """Return the interval of an estimate.

    Args:
        samples: influences of the observations, (observations,), for each independent sample. Their order is nothing.

    Returns:
        One without width for a sample of one observation, or of observations that are all alike.
    """
    if not _are_informative(samples):
        return Interval(estimate, estimate, resampling.confidence)
    spread, drawn = _Spread.of(samples), _draw_means(samples, resampling)
    return _make_interval(estimate, spread, drawn, resampling.confidence)


def examine_difference(estimate: float, samples: Sequence[np.ndarray], resampling: Resampling) -> Tested:
    """Return the interval of a difference, and the p-value of no difference.

    The p-value is the larger one of those of the two intervals. That of the bootstrap is at least 2 / (resamples + 1).
    Where every observation is the same difference, it is that of the sign test.
    """
    if not _are_informative(samples):
        interval = Interval(estimate, estimate, resampling.confidence)
        fewest = min(len(sample) for sample in samples)
        return Tested(interval, 2.0 ** (1 - fewest) if abs(estimate) > ROUNDING else 1.0)
    spread, drawn = _Spread.of(samples), _draw_means(samples, resampling)
    crossing = (drawn.highest + estimate >= 0) if estimate < 0 else (drawn.lowest + estimate <= 0)
    by_bootstrap = 2 * (int(crossing.sum()) + 1) / (len(crossing) + 1)
    by_student = 2 * compute_student_tail(abs(estimate) / spread.error, spread.freedom)
    interval = _make_interval(estimate, spread, drawn, resampling.confidence)
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


def _are_informative(samples: Sequence[np.ndarray]) -> bool:
    return min(len(sample) for sample in samples) > 1 and any(bool(sample.any()) for sample in samples)


def _make_interval(estimate: float, spread: _Spread, drawn: _DrawnMeans, confidence: float) -> Interval:
    edge = (1 - confidence) / 2
    width = compute_student_quantile(1 - edge, spread.freedom) * spread.error
    low, high = float(np.quantile(drawn.lowest, edge)), float(np.quantile(drawn.highest, 1 - edge))
    return Interval(estimate + min(low, -width), estimate + max(high, width), confidence)


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
