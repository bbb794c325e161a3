"""What one server accepts now, beside the same draft's first hours on it and beside the walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftworks.config.observation import ObservationSpec
from draftworks.errors import DraftworksError
from draftworks.evaluation.report.summary import TRAINED, ReportSummary, RungScore
from draftworks.production.acceptance import (
    WindowAcceptance,
    WindowDifference,
    compare_acceptance,
    estimate_acceptance,
)
from draftworks.production.observer import Observation
from draftworks.production.readings import Reading, Window, split_windows
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.asset_names import of_strategy
from draftworks.storage.records import ReportIdentity
from draftworks.targets.registry import HELDOUT

HOUR_S = 3600.0
GAP_S = 2 * HOUR_S
WALK_RUNG = 3


@dataclass(frozen=True)
class ServerStanding:
    """The figures of one server, by its counters (rung 6 of the acceptance ladder, on the traffic that it had).

    Attributes:
        draft: the draft it serves; None if the server was never read.
        by_server: whether the server said so.
        now: over the last hours; None without a window.
        baseline: over the first hours of this draft on this server; None as long as they are not over.
        difference: now minus baseline; None where the two share windows, or one has no pass.
        gauge: accepted tokens per pass by a gauge, for a server without counters.
        restarts, gaps: number of restarts, and of windows of more than GAP_S seconds, over the whole series.
        walk: what the walk gave for this draft on `heldout`: another rung, other prompts.
    """

    observation: Observation
    draft: str | None
    by_server: bool
    now: WindowAcceptance | None
    baseline: WindowAcceptance | None
    difference: WindowDifference | None
    gauge: float | None
    restarts: int
    gaps: int
    walk: RungScore | None

    @property
    def server(self) -> str:
        return self.observation.server.name


def assess_server(observation: Observation, hours: ObservationSpec, walk: RungScore | None = None) -> ServerStanding:
    """Return the standing of a server by its series. The last reading is `now`, whenever that was."""
    readings = observation.readings
    last = readings[-1] if readings else None
    windows = split_windows(readings)
    own = [window for window in windows if last is not None and window.draft == last.draft]
    first_hours, later = _divide(own, hours.baseline_hours * HOUR_S)
    recent_s = hours.recent_hours * HOUR_S
    recent = _select_last(later or own, recent_s)  # what is compared with the first hours lies after them
    difference = compare_acceptance(recent, first_hours) if later else None
    return ServerStanding(
        observation=observation,
        draft=None if last is None else last.draft,
        by_server=last is not None and last.by_server,
        now=estimate_acceptance(recent) if recent else None,
        baseline=estimate_acceptance(first_hours) if later else None,
        difference=difference,
        gauge=_read_gauge(last),
        restarts=sum(window.restarted for window in windows),
        gaps=sum(window.end - window.begin > GAP_S for window in windows),
        walk=walk,
    )


def _divide(windows: Sequence[Window], baseline_s: float) -> tuple[list[Window], list[Window]]:
    """Return the windows of the first `baseline_s` seconds, and the others. A window over the edge goes by its middle."""
    if not windows:
        return [], []
    until = windows[0].begin + baseline_s
    first = [one for index, one in enumerate(windows) if index == 0 or _find_middle(one) <= until]
    return first, list(windows[len(first) :])


def _select_last(windows: Sequence[Window], seconds: float) -> list[Window]:
    """Return the windows of the last `seconds` seconds, at least one. A window over the edge goes by its middle."""
    if not windows:
        return []
    since = windows[-1].end - seconds
    return [one for one in windows if one is windows[-1] or _find_middle(one) >= since]


def _find_middle(window: Window) -> float:
    return (window.begin + window.end) / 2


def _read_gauge(last: Reading | None) -> float | None:
    if last is None or last.counters or last.gauge is None:
        return None
    return max(last.gauge - 1, 0.0)  # it counts the target's own token


def find_walk(artifacts: ArtifactStore, target: str, strategy: str, draft: str | None) -> RungScore | None:
    """Return rung 3 of the newest report of a draft on `heldout`; None if there is no report that can be read."""
    for report in artifacts.list_all(of_strategy(strategy).report, target) if draft else ():
        try:
            if ReportIdentity.of(report).draft_identity == draft:
                scores = ReportSummary.load(report.path / HELDOUT).select_scores(TRAINED, WALK_RUNG)
                return scores[0] if scores else None
        except DraftworksError:
            continue
    return None


def assess_all(
    observations: Sequence[Observation], hours: ObservationSpec, artifacts: ArtifactStore, target: str
) -> list[ServerStanding]:
    """Return the standing of each server, with the walk of the draft that it serves."""
    found = []
    for one in observations:
        draft = one.readings[-1].draft if one.readings else None
        found.append(assess_server(one, hours, find_walk(artifacts, target, one.server.strategy, draft)))
    return found
