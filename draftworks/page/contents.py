"""What the page of the fleet shows, read from records alone: no server is asked and no weights are read. Torch-free.

A part that cannot be read is told in its place, and the others are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from draftworks.config.registry_files import TargetSpec
from draftworks.decision.fleet_status import DraftStatus, Need, describe_row, read_status
from draftworks.decision.record import read_decision_history
from draftworks.errors import DraftworksError, StoreError
from draftworks.evaluation.acceptance_length import count_own_token
from draftworks.evaluation.report.summary import SLICES, TRAINED, ReportSummary
from draftworks.evaluation.rivals.names import NO_DRAFT, RIVAL_MEANINGS
from draftworks.export.conventions import DRAFT_FOLDER
from draftworks.fleet.leaderboard import read_measured
from draftworks.page.charts import IntervalChart, Line, LineChart, Measured, draw_intervals, draw_lines
from draftworks.planning.estimates import Estimate
from draftworks.planning.plan import compare_plan, load_plan
from draftworks.planning.plan_table import format_seconds
from draftworks.planning.subject import PlanSubject
from draftworks.production.observer import Observer
from draftworks.production.standing import COLUMNS, assess_all, format_row, list_points
from draftworks.service.register import ServiceRegister
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.files import read_json
from draftworks.storage.names import (
    CONVERSATIONS,
    HELDOUT,
    RESPONSES,
    TOKENIZED_TRAIN,
    TRAINING_FEATURES,
    VOCAB_MAPPING,
    of_strategy,
)
from draftworks.targets.registry import Registry

WALK = 3
MOST_SLICES, MOST_DECISIONS = 40, 20
MADE_FROM = (CONVERSATIONS, RESPONSES, TOKENIZED_TRAIN, VOCAB_MAPPING, TRAINING_FEATURES)
_Part = TypeVar("_Part")


@dataclass(frozen=True)
class Table:
    """Rows of texts under headings; `more` rows were left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


@dataclass(frozen=True)
class EvalSetSection:
    """A draft on one eval set: the walk beside what costs nothing, and by slice."""

    name: str
    verdict: str
    drafts: IntervalChart | None
    slices: IntervalChart | None
    more_slices: int = 0


@dataclass(frozen=True)
class DraftSection:
    """One strategy of a target."""

    status: DraftStatus
    eval_sets: tuple[EvalSetSection, ...] = ()
    measured_over_time: LineChart | None = None
    served_over_time: LineChart | None = None
    servers: Table | None = None
    requests: tuple[Table, ...] = ()
    curves: tuple[LineChart, ...] = ()
    service: Table | None = None
    decisions: Table | None = None
    lineage: Table | None = None
    costs: Table | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """Name of the section in the page's addresses."""
        return self.status.name.replace("/", "--")


@dataclass(frozen=True)
class FleetPage:
    """All of the page; `made` is in UTC."""

    made: datetime
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sections: tuple[DraftSection, ...]

    @property
    def moment(self) -> str:
        return f"{self.made:%Y-%m-%d %H:%M} UTC"


def read_page(registry: Registry, now: float) -> FleetPage:
    """Return the contents of the page; drafts stand in the order in which they need a person.

    Args:
        now: seconds since the epoch.

    Raises:
        ConfigError: there is no registry, or `deployment.yaml` cannot be read.
    """
    found = read_status(registry, None, now)
    artifacts = ArtifactStore(registry.resolve_var_folder())
    rows = [describe_row(one) for one in found]
    columns = tuple(rows[0]) if rows else ()
    sections = tuple(
        _SectionReader(registry, artifacts, one).read() for one in found if one.need is not Need.NOTHING_MADE
    )
    return FleetPage(datetime.fromtimestamp(now, UTC), columns, tuple(tuple(row.values()) for row in rows), sections)


@dataclass
class _SectionReader:
    """Reads the section of one draft; what cannot be read is in `problems`."""

    registry: Registry
    artifacts: ArtifactStore
    status: DraftStatus
    problems: list[str] = field(default_factory=list)

    def read(self) -> DraftSection:
        if not self.status.strategy:
            return DraftSection(self.status, problems=(self.status.why,))
        target = self._try(lambda: self.registry.load_target(self.status.target), None)
        export = self._find("export")
        return DraftSection(
            self.status,
            eval_sets=tuple(self._try(lambda: list(_read_eval_sets(self._find("report"))), [])),
            measured_over_time=self._try(self._draw_reports, None),
            **({} if target is None else self._read_servers(target)),
            requests=() if target is None else tuple(self._try(lambda: list(self._read_requests(target)), [])),
            curves=tuple(self._try(lambda: list(_draw_training(self._find("draft"))), [])),
            service=self._try(self._list_service, None),
            decisions=self._try(self._list_decisions, None),
            lineage=self._try(self._list_lineage, None),
            costs=None if target is None else self._try(self._list_costs, None),
            commands={} if export is None else dict(_list_commands(export)),
            problems=tuple(dict.fromkeys(self.problems)),
        )

    @property
    def _names(self) -> tuple[str, str]:
        return self.status.target, self.status.strategy

    def _find(self, kind: str) -> Artifact | None:
        name = getattr(of_strategy(self.status.strategy), kind)
        return self._try(lambda: self.artifacts.find(name, self.status.target), None)

    def _try(self, read: Callable[[], _Part], otherwise: _Part) -> _Part:
        try:
            return read()
        except (DraftworksError, OSError) as error:
            self.problems.append(" ".join(str(error).split()))
            return otherwise

    def _draw_reports(self) -> LineChart | None:
        """Return the walk (or rung 1) of every report ever published, of the metric of the newest."""
        reports = self.artifacts.list_all(of_strategy(self.status.strategy).report, self.status.target)
        found = sorted((read_measured(each) for each in reports), key=lambda one: one.created)
        same = [one for one in found if one.score.metric == found[-1].score.metric]
        points = [(one.created, count_own_token(one.score.value)) for one in same if one.score.value is not None]
        return draw_lines("reports", [Line("τ", points)], over_time=True, from_one=True) if len(points) > 1 else None

    def _read_servers(self, target: TargetSpec) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            if not any(server.strategy == self.status.strategy for server in target.servers):
                return {}
            seen = Observer.of(target, self.registry.root, self.artifacts.root).recall(self.status.strategy)
            standings = assess_all(seen, target.observation, self.artifacts, target.name)
            lines = [
                Line(one.server, [(time, count_own_token(value)) for time, value in list_points(one).items()])
                for one in standings
            ]
            rows = tuple(tuple(map(str, format_row(one))) for one in standings)
            return {
                "served_over_time": draw_lines("served", lines, over_time=True, from_one=True),
                "servers": Table(tuple(COLUMNS), rows),
            }

        return self._try(read, {})

    def _read_requests(self, target: TargetSpec) -> Iterator[Table]:
        """Yield what logged requests accept, by slice, beside the walk and the draft's first hours."""
        if target.observation.requests is None:
            return
        from draftworks.production.served_logs import read_served_logs  # numpy
        from draftworks.production.served_view import COLUMNS as SLICES_OF_REQUESTS
        from draftworks.production.served_view import list_rows

        logs = read_served_logs(target, self.registry.root, self.artifacts, self.status.strategy)
        for standing in logs.standings:
            rows = tuple(list_rows(standing))
            more = sum(each.now is not None for each in standing.slices) - len(rows)
            yield Table(SLICES_OF_REQUESTS, rows, more)

    def _list_service(self) -> Table | None:
        history = ServiceRegister(self.artifacts.root, *self._names).read_history()
        rows = [(_day(one.when), one.action, one.draft.digest, one.who, one.why) for one in reversed(history)]
        return _cut(("when", "what", "draft", "who", "why"), rows)

    def _list_decisions(self) -> Table | None:
        found = read_decision_history(self.artifacts.root, *self._names)
        rows = [(_day(one.when), str(one.choice), "; ".join(one.reasons)) for one in reversed(found)]
        return _cut(("when", "choice", "reasons"), rows)

    def _list_lineage(self) -> Table | None:
        own = of_strategy(self.status.strategy)
        names = (*MADE_FROM, own.draft, own.report, own.export, own.serving)
        found = [self.artifacts.find(name, self.status.target) for name in names]
        rows = [
            (one.asset, one.path.name, _moment(one.created), format_seconds(Estimate.exactly(one.seconds)))
            for one in found
            if one is not None
        ]
        return Table(("result", "digest", "made", "took"), tuple(rows)) if rows else None

    def _list_costs(self) -> Table | None:
        saved = load_plan(self.artifacts.root, self.status.target)
        if saved is None:
            return None
        steps = compare_plan(saved, PlanSubject.of(self.status.target, self.registry))
        rows = tuple(
            (
                one.step.asset,
                format_seconds(one.step.seconds),
                "not yet" if one.seconds is None else format_seconds(Estimate.exactly(one.seconds)),
            )
            for one in steps
        )
        return Table(("step", "planned", "took"), rows)


def _read_eval_sets(report: Artifact | None) -> Iterator[EvalSetSection]:
    if report is None:
        return
    for name in report.summary.get("evals", (HELDOUT,)):
        summary = ReportSummary.load(report.path / name)
        slices = list(_read_slices(report.path / name))
        yield EvalSetSection(
            name,
            "" if summary.rivals is None else summary.rivals.describe(),
            draw_intervals(list(_list_drafts(summary))),
            draw_intervals(slices[:MOST_SLICES]),
            max(0, len(slices) - MOST_SLICES),
        )


def _list_drafts(summary: ReportSummary) -> Iterator[Measured]:
    """Yield the trained draft and what costs nothing, by the walk, the best first."""
    names = dict.fromkeys(score.draft for score in summary.scores)
    walks = [score for name in names if name != NO_DRAFT for score in summary.select_scores(name, WALK)]
    known = [score for score in walks if score.value is not None]
    for score in sorted(known, key=lambda one: -(one.value or 0.0)):
        name = f"this draft, {summary.strategy}" if score.draft == TRAINED else score.draft.replace("_", " ")
        yield Measured(name, score.value or 0.0, score.low, score.high)


def _read_slices(folder: Path) -> Iterator[Measured]:
    """Yield the slices of an eval set that have a pass, with the best rival on each where that was measured."""
    import pandas as pd

    path = folder / SLICES
    if not path.exists():
        return
    try:
        rows = pd.read_parquet(path).to_dict("records")
        for row in rows:
            if row["passes"]:
                rival = row.get("rival_micro")
                prompts = int(row["prompts"])
                bounds = (row["low"], row["high"]) if prompts > 1 else (None, None)
                name = f"{row['column']}: {row['value']} ({prompts:,})"
                yield Measured(name, row["micro"], *bounds, None if rival is None or pd.isna(rival) else float(rival))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _draw_training(draft: Artifact | None) -> Iterator[LineChart]:
    """Yield the curves of a training: loss, and rung 1 on training and held-out data."""
    path = None if draft is None else draft.path / "history.json"
    if path is None or not path.exists():
        return
    try:
        history = read_json(path)
        train, evals = history["train"], history["evals"]
        loss = [(one["step"], one["loss"]) for one in train if one["loss"] is not None]
        seen = [(one["step"], count_own_token(one["simulated_acc_len"])) for one in train]
        held = [(one["step"], count_own_token(one["metrics"]["eval/simulated_acc_len"])) for one in evals]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error!r}") from error
    lines = [Line("training data", seen), Line("held out", held)]
    charts = (draw_lines("loss", [Line("loss", loss)]), draw_lines("τ by rung 1", lines, from_one=True))
    yield from (chart for chart in charts if chart is not None)


def _list_commands(export: Artifact) -> Iterator[tuple[str, str]]:
    """Yield a name and the command that serves with it, of every exported format; the draft's folder is the export's."""
    for name, one in sorted(export.summary.get("formats", {}).items()):
        for server, command in one.get("commands", {}).items():
            yield f"{server}, {name}", command.replace(DRAFT_FOLDER, str(export.path / name))


def _cut(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table | None:
    """Return the first rows as a table that says how many it leaves out; None without a row."""
    return Table(columns, tuple(rows[:MOST_DECISIONS]), max(0, len(rows) - MOST_DECISIONS)) if rows else None


def _day(when: str) -> str:
    return f"{datetime.fromisoformat(when):%Y-%m-%d}"


def _moment(created: float) -> str:
    return f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M}"


def list_rivals(sections: Iterable[DraftSection]) -> dict[str, str]:
    """Return what each rival is, if any draft has an eval set."""
    return dict(RIVAL_MEANINGS) if any(one.eval_sets for one in sections) else {}
