"""Accepted tokens per pass over the windows of a server, with its interval by a block bootstrap.

Neighbouring windows resemble each other, as requests and traffic last longer than a window. So blocks of successive windows
are resampled (circular block bootstrap, Politis and Romano 1992), of about the cube root of their number each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftworks.evaluation.ladder.statistics import DEFAULT_RESAMPLING, Interval, Resampling
from draftworks.production.readings import Window

LEAST_WINDOWS = 12
MOST_WINDOWS = 480


@dataclass(frozen=True)
class WindowAcceptance:
    """Accepted tokens per pass over windows.

    Attributes:
        value: None without a pass.
        interval: None where there are fewer than LEAST_WINDOWS windows with a pass.
        windows: number of windows with a pass.
    """

    value: float | None
    interval: Interval | None
    passes: int
    accepted: int
    windows: int
    seconds: float


@dataclass(frozen=True)
class WindowDifference:
    """Accepted tokens per pass of some windows minus those of others; no interval where one of them has none."""

    value: float
    interval: Interval | None


def estimate_acceptance(windows: Sequence[Window], resampling: Resampling = DEFAULT_RESAMPLING) -> WindowAcceptance:
    """Return the accepted tokens per pass over all these windows, oldest first, with the interval."""
    counts = _count(windows)
    passes, accepted = (int(each) for each in counts.sum(axis=0))
    resampled = _resample(counts, resampling, seed=resampling.seed)
    return WindowAcceptance(
        value=accepted / passes if passes else None,
        interval=None if resampled is None else _take_percentiles(resampled, resampling.confidence),
        passes=passes,
        accepted=accepted,
        windows=sum(bool(window.passes) for window in windows),
        seconds=sum(window.end - window.begin for window in windows),
    )


def compare_acceptance(
    now: Sequence[Window], before: Sequence[Window], resampling: Resampling = DEFAULT_RESAMPLING
) -> WindowDifference | None:
    """Return what is accepted in `now` minus `before`, which share no window; None if one of them has no pass."""
    counts = [_count(windows) for windows in (now, before)]
    totals = [each.sum(axis=0) for each in counts]
    if not all(total[0] for total in totals):
        return None
    values = [total[1] / total[0] for total in totals]
    resampled = [_resample(each, resampling, seed=resampling.seed + index) for index, each in enumerate(counts)]
    interval = None
    if resampled[0] is not None and resampled[1] is not None:
        interval = _take_percentiles(resampled[0] - resampled[1], resampling.confidence)
    return WindowDifference(float(values[0] - values[1]), interval)


def _count(windows: Sequence[Window]) -> np.ndarray:
    """Return passes and accepted tokens of the windows with a pass, (windows, 2); many windows are joined to fewer."""
    found = np.array([[one.passes, one.accepted] for one in windows if one.passes], dtype=np.float64).reshape(-1, 2)
    if len(found) <= MOST_WINDOWS:
        return found
    starts = np.linspace(0, len(found), MOST_WINDOWS, endpoint=False).astype(int)
    return np.add.reduceat(found, starts, axis=0)


def _resample(counts: np.ndarray, resampling: Resampling, seed: int) -> np.ndarray | None:
    """Return accepted tokens per pass on resamples of blocks, (resamples,); None for too few windows."""
    size = len(counts)
    if size < LEAST_WINDOWS:
        return None
    length = round(size ** (1 / 3))
    circular = np.concatenate([np.zeros((1, 2)), np.cumsum(np.concatenate([counts, counts[: length - 1]]), axis=0)])
    blocks = circular[length:] - circular[:-length]  # (windows, 2): the sums of the block that begins at each window
    rng = np.random.default_rng(seed)
    drawn = rng.integers(size, size=(resampling.resamples, -(-size // length)))
    sums = blocks[drawn].sum(axis=1)  # (resamples, 2)
    return sums[:, 1] / sums[:, 0]


def _take_percentiles(resampled: np.ndarray, confidence: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), confidence)
