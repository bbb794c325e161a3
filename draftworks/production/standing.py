"""Acceptance of one server now, beside the same draft's first hours on it and beside the walk; its views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from draftworks.config.observation import ObservationSpec
from draftworks.errors import DraftworksError
from draftworks.evaluation.acceptance_length import (
    NAME,
    NOTE,
    SYMBOL,
    count_own_token,
    format_change,
    format_interval,
    format_length,
)
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.report.summary import TRAINED, ReportSummary, RungScore
from draftworks.production.observer import UNKNOWN_DRAFT, Observation
from draftworks.production.readings import (
    Reading,
    Window,
    WindowAcceptance,
    WindowDifference,
    compare_acceptance,
    estimate_acceptance,
    split_windows,
)
from draftworks.storage.artifacts import ArtifactStore
from draftworks.storage.names import of_strategy
from draftworks.storage.records import ReportIdentity
from draftworks.storage.words import format_count
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


COLUMNS: tuple[str, ...] = (
    "server",
    "kind",
    "strategy",
    "draft",
    f"{SYMBOL} now",
    f"{SYMBOL} first hours",
    "difference",
    f"{SYMBOL} walk (rung 3)",
    "passes",
    "read",
)
CAPTION = (
    f"{NOTE} By the server's own counters over its own traffic (rung 6), with 95% intervals over "
    "blocks of windows. First hours: of the same draft on the same server. The walk is another rung, over other "
    "prompts (heldout): it stands beside, and does not compare."
)
NO_INTERVAL = "no interval"
MOST_POINTS = 200


def format_row(standing: ServerStanding) -> tuple[str, ...]:
    """Return the cells of a server's row, in the order of COLUMNS."""
    server = standing.observation.server
    readings = standing.observation.readings
    difference = standing.difference
    return (
        server.name,
        server.kind,
        server.strategy,
        _format_draft(standing),
        _format_now(standing),
        "" if standing.baseline is None else format_acceptance(standing.baseline),
        "" if difference is None else _format_difference(difference),
        "" if standing.walk is None or standing.walk.value is None else format_length(standing.walk.value, 3),
        "" if standing.now is None else f"{standing.now.passes:,}",
        "never" if not readings else f"{datetime.fromtimestamp(readings[-1].time, UTC):%Y-%m-%d %H:%M:%S} UTC",
    )


def list_notes(standings: Sequence[ServerStanding]) -> list[str]:
    """Return the notes below the table: remarks of servers, restarts, gaps, why there is no interval."""
    notes = []
    for one in standings:
        found = list(one.observation.remarks)
        if one.now is not None and one.now.value is not None and one.now.interval is None:
            found.append(f"{format_count(one.now.windows, 'window')} with a pass: too few for an interval")
        if one.now is not None and one.now.value is None:
            found.append("no pass was verified in these hours")
        if one.now is None and one.gauge is None and one.draft is not None:
            found.append("read once since it serves this draft: what it accepts is known after the next reading")
        if one.now is not None and one.baseline is None:
            found.append("the first hours of this draft are not over: nothing to compare with yet")
        if one.restarts or one.gaps:
            restarts, gaps = format_count(one.restarts, "restart"), format_count(one.gaps, "gap")
            found.append(f"{restarts}, {gaps} of more than {GAP_S / 3600:g} h in the series")
        notes += [f"{one.server}: {each}" for each in found]
    return notes


def format_acceptance(found: WindowAcceptance) -> str:
    if found.value is None:
        return ""
    interval = NO_INTERVAL if found.interval is None else format_interval(found.interval.low, found.interval.high, 3)
    return f"{format_length(found.value, 3)} ({interval})"


def to_json(standing: ServerStanding) -> dict[str, Any]:
    """Return the standing of a server as JSON values."""
    walk, observation = standing.walk, standing.observation
    return {
        "server": standing.server,
        "kind": observation.server.kind,
        "strategy": observation.server.strategy,
        "version": observation.readings[-1].version if observation.readings else None,
        "draft": standing.draft,
        "draft_by_server": standing.by_server,
        "read": observation.readings[-1].time if observation.readings else None,
        "now": None if standing.now is None else asdict(standing.now),
        "baseline": None if standing.baseline is None else asdict(standing.baseline),
        "difference": None if standing.difference is None else asdict(standing.difference),
        "gauge": standing.gauge,
        "walk": None if walk is None else {name: getattr(walk, name) for name in ("metric", "value", "low", "high")},
        "restarts": standing.restarts,
        "gaps": standing.gaps,
        "problem": observation.problem,
        "remarks": list(observation.remarks),
    }


def plot_series(standings: Sequence[ServerStanding], title: str) -> bytes | None:
    """Return a PNG with the acceptance length of each server over time; None if no server has anything to show."""
    from draftworks.evaluation.report.plots import COLOURS, label_axes, make_figure, render_png

    lines = {one.server: list_points(one) for one in standings}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return None
    figure = make_figure(8.0, 3.6)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(lines.items()):
        times = [datetime.fromtimestamp(time, UTC) for time in points]
        colour = COLOURS[index % len(COLOURS)]
        lengths = [count_own_token(each) for each in points.values()]
        axes.plot(times, lengths, color=colour, marker=".", linewidth=1, label=name)  # pyright: ignore
    axes.set_ylim(bottom=count_own_token(0.0))
    figure.autofmt_xdate()
    figure.legend(loc="outside lower center", frameon=False)
    label_axes(axes, title, "", f"{NAME} (rung 6)")
    return render_png(figure)


def list_points(standing: ServerStanding, most: int = MOST_POINTS) -> Mapping[float, float]:
    """Return accepted tokens per pass by the time of each window's end, or of each gauge; neighbours are joined."""
    readings = standing.observation.readings
    windows = [window for window in split_windows(readings) if window.passes]
    if not windows:
        gauges = [one for one in readings if one.gauge is not None and not one.counters]
        step = -(-len(gauges) // most) or 1
        return {one.time: max((one.gauge or 0.0) - 1, 0.0) for one in gauges[::step]}
    size = -(-len(windows) // most)
    groups: list[list[Window]] = [windows[start : start + size] for start in range(0, len(windows), size)]
    return {group[-1].end: sum(w.accepted for w in group) / sum(w.passes for w in group) for group in groups}


def _format_now(standing: ServerStanding) -> str:
    if standing.now is not None:
        return format_acceptance(standing.now)
    return "" if standing.gauge is None else f"{format_length(standing.gauge, 3)} (gauge, {NO_INTERVAL})"


def _format_draft(standing: ServerStanding) -> str:
    if standing.draft is None:
        return ""
    if standing.by_server or standing.draft == UNKNOWN_DRAFT:
        return standing.draft
    return f"{standing.draft} (in service; the server does not say)"


def _format_difference(found: WindowDifference) -> str:
    if found.interval is None:
        return f"{format_change(found.value)} ({NO_INTERVAL})"
    return format_change(found.value, found.interval.low, found.interval.high)


def render_markdown(standings: Sequence[ServerStanding]) -> str:
    """Return the table of servers with its caption and notes, and the servers that could not be read, as Markdown."""
    rows = [dict(zip(COLUMNS, format_row(one), strict=True)) for one in standings]
    problems = [one.observation.problem for one in standings if one.observation.problem is not None]
    notes = "\n".join(f"* {each}" for each in [*problems, *list_notes(standings)])
    return f"{render_table(rows, COLUMNS)}\n\n{CAPTION}\n\n{notes}\n"


def select_figures(standings: Sequence[ServerStanding]) -> dict[str, float]:
    """Return the acceptance length and the difference from the first hours by server, for plots over time."""
    found: dict[str, float] = {}
    for one in standings:
        value = one.gauge if one.now is None else one.now.value
        if value is not None:
            found[f"acceptance_length_{one.server}"] = count_own_token(value)
        if one.difference is not None:
            found[f"difference_{one.server}"] = one.difference.value
    return found
