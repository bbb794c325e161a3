"""Accepted tokens per pass over the windows of a server, with its interval by blocks of windows.

Neighbouring windows resemble each other, as requests and traffic last longer than a window: see `find_block_interval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceRatio,
    Interval,
    Resampling,
    find_block_interval,
)
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
    return WindowAcceptance(
        value=accepted / passes if passes else None,
        interval=None if len(counts) < LEAST_WINDOWS else _find_interval(accepted / passes, [counts], resampling),
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
    difference = float(values[0] - values[1])
    enough = min(map(len, counts)) >= LEAST_WINDOWS
    return WindowDifference(difference, _find_interval(difference, counts, resampling) if enough else None)


def _count(windows: Sequence[Window]) -> np.ndarray:
    """Return passes and accepted tokens of the windows with a pass, (windows, 2); many windows are joined to fewer."""
    found = np.array([[one.passes, one.accepted] for one in windows if one.passes], dtype=np.float64).reshape(-1, 2)
    if len(found) <= MOST_WINDOWS:
        return found
    starts = np.linspace(0, len(found), MOST_WINDOWS, endpoint=False).astype(int)
    return np.add.reduceat(found, starts, axis=0)


def _find_interval(estimate: float, counts: Sequence[np.ndarray], resampling: Resampling) -> Interval:
    """Return the interval of accepted tokens per pass, or of the first minus the second."""
    series = [AcceptanceRatio.of_counts(accepted=each[:, 1], passes=each[:, 0]).influences for each in counts]
    return find_block_interval(estimate, [sign * each for sign, each in zip((1, -1), series)], resampling)
