"""The interval of an estimate whose observations follow each other in time and resemble their neighbours.

Blocks of successive observations take the place of single ones: circular blocks (Politis and Romano 1992), of about the
cube root of their number each. The interval is the wider one, on each side, of the percentiles of blocks that are drawn and
of Student's t with as many observations as there are blocks side by side, since a few blocks vary too little by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from draftworks.evaluation.ladder.statistics.resampling import Interval, Resampling
from draftworks.evaluation.ladder.statistics.student import compute_student_quantile


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
