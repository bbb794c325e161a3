"""Readings of one server as they are stored, and the windows between them.

Counters start at 0 with each process. So what a window counted is the difference of two readings of one process; after a
restart it is the later reading alone, since that process counted from 0. What the former process counted after its last
reading is lost. Counts are therefore never too large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftworks.errors import StoreError
from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceRatio,
    Interval,
    Resampling,
    find_block_interval,
)
from draftworks.production.scrape import count_accepted
from draftworks.servers.counters import PASSES


@dataclass(frozen=True)
class Reading:
    """One line of a server's series.

    Attributes:
        time: seconds since the epoch.
        instance, counters, gauge: see `Scrape`.
        draft: digest of a draft of this installation, or what the server calls it.
        by_server: whether the server said which draft it serves.
    """

    time: float
    instance: str | None
    draft: str
    by_server: bool
    version: str | None
    counters: Mapping[str, int]
    gauge: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Reading:
        """Return the reading of one line. Raises StoreError if it is none."""
        try:
            found = cls(**values)
            texts = (found.draft, found.instance or "", found.version or "")
            counts = all(isinstance(name, str) and type(n) is int and n >= 0 for name, n in found.counters.items())
            gauge = found.gauge is None or math.isfinite(found.gauge)
            if not (math.isfinite(found.time) and counts and gauge and all(isinstance(each, str) for each in texts)):
                raise ValueError("a value that cannot be")
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"not a reading of a server: {error}") from None
        return found


@dataclass(frozen=True)
class Window:
    """The counts of a server between two readings.

    Attributes:
        begin, end: seconds since the epoch.
        draft: None if the draft changed without a restart, so that nobody knows whose the counts are.
        counts: differences of the counters.
        restarted: whether the server was started meanwhile.
    """

    begin: float
    end: float
    draft: str | None
    counts: Mapping[str, int]
    restarted: bool

    @property
    def passes(self) -> int:
        return self.counts[PASSES]

    @property
    def accepted(self) -> int:
        return count_accepted(self.counts)


def is_restart(before: Reading, instance: str | None, counters: Mapping[str, int]) -> bool:
    """Whether another process counted `counters` than that of the reading `before`: it says so, or a counter fell."""
    if before.instance is not None and instance is not None and before.instance != instance:
        return True
    return any(value < 0 for value in subtract(counters, before.counters).values())


def subtract(counters: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return the differences by name; a counter that is new counted from 0, and one that is gone fell to -1."""
    gone = {name: -1 for name in before if name not in counters}
    return {**{name: value - before.get(name, 0) for name, value in counters.items()}, **gone}


def split_windows(readings: Sequence[Reading]) -> list[Window]:
    """Return the windows between successive readings that have counters, oldest first."""
    counted = [reading for reading in readings if PASSES in reading.counters]
    found = []
    for before, after in zip(counted, counted[1:]):
        restarted = is_restart(before, after.instance, after.counters)
        counts = dict(after.counters) if restarted else subtract(after.counters, before.counters)
        whose = after.draft if restarted or before.draft == after.draft else None
        found.append(Window(before.time, after.time, whose, counts, restarted))
    return found


def thin(readings: Sequence[Reading], most: int) -> list[Reading]:
    """Return at most `most` readings: every second of the older half is left out, as long as there are too many.

    Differences add up, so no count is lost: the last reading of each process and the first of the next one are kept. Only
    where these alone are too many are the oldest dropped.
    """
    kept = list(readings)
    while len(kept) > most:
        edges = {0, len(kept) - 1}
        for index in range(1, len(kept)):
            before, after = kept[index - 1], kept[index]
            if before.draft != after.draft or is_restart(before, after.instance, after.counters):
                edges |= {index - 1, index}
        half = len(kept) // 2
        thinned = [one for index, one in enumerate(kept) if index in edges or index >= half or index % 2 == 0]
        kept = thinned if len(thinned) < len(kept) else kept[-most:]
    return kept


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
    """Accepted tokens per pass of one set of windows minus another; no interval where either has none."""

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
    """Return accepted tokens per pass in `now` minus `before`, which share no window; None if one of them has no
    pass."""
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
