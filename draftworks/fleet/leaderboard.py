"""The leaderboard: acceptance, interval, age, best value and staleness of every draft of every target.

It reads records only, no features or weights, and imports no torch: a thousand targets take seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import DraftworksError
from draftworks.evaluation.acceptance_length import (
    NAME,
    NOTE,
    count_own_token,
    format_change,
    format_interval,
    format_length,
    name_metric,
)
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.evaluation.report.served import list_served, name_engine
from draftworks.evaluation.report.summary import TRAINED, ReportSummary, RungScore
from draftworks.fleet.staleness import Subject, TrainedDraft
from draftworks.storage.artifacts import Artifact, ArtifactStore, ReadOnceStore
from draftworks.storage.files import publish_file
from draftworks.storage.identity import FileDigests, ReadOnceDigests
from draftworks.storage.names import of_eval_set, of_strategy
from draftworks.storage.records import ConversationsIdentity, EvalSetIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT, ReadOnceRegistry, Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import identify_eval_data

if TYPE_CHECKING:
    import pandas as pd

WALK_RUNG, SIMULATED_RUNG = 3, 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportScore:
    """The main score of one published report.

    Attributes:
        created: seconds since the epoch.
        draft: name of the draft, the digest of what it was made from; None in early records.
        rivals: the draft beside the best that costs nothing; None in reports from before that was measured.
    """

    eval_set: str
    score: RungScore
    created: float
    draft: str | None
    rivals: RivalVerdict | None = None


@dataclass(frozen=True)
class ServedScore:
    """What a live server accepted in a serving check (rung 6).

    Attributes:
        accepted: accepted tokens per pass, greedy; None without a pass.
        from_walk: the same minus the walk's on the same samples.
    """

    engine: str
    accepted: float | None
    from_walk: float


@dataclass(frozen=True)
class Standing:
    """Leaderboard row of one strategy of one target, or of a target whose registry entry cannot be read (strategy
    empty).

    Attributes:
        latest: the newest report; None if there is none that can be read.
        best: the report with the highest value of the same metric, among all that were ever published.
        stale_against: in words, what has changed since the newest report.
        draft_changes: in words, what has changed since the draft was trained. A new report does not change that.
        problem: why there is no `latest`, or why staleness is not known.
        served: what live servers accepted of the draft of `latest`, by engine.
    """

    target: str
    strategy: str
    latest: ReportScore | None = None
    best: ReportScore | None = None
    stale_against: tuple[str, ...] = ()
    draft_changes: tuple[str, ...] = ()
    problem: str | None = None
    served: tuple[ServedScore, ...] = ()

    @property
    def value(self) -> float | None:
        return None if self.latest is None else self.latest.score.value


@dataclass(frozen=True)
class Fleet:
    """Registry and results that the leaderboard is read from."""

    registry: Registry
    artifacts: ArtifactStore
    digests: FileDigests

    @classmethod
    def of(cls, registry: Registry) -> Fleet:
        var = registry.resolve_var_folder()
        return cls(registry, ArtifactStore(var), FileDigests(var / "digests.json"))

    def read_once(self) -> Fleet:
        """Return the fleet as it is at one moment: each entry and file is read once."""
        if isinstance(self.registry, ReadOnceRegistry):
            return self
        return replace(self, registry=ReadOnceRegistry(self.registry.root), digests=ReadOnceDigests(self.digests))

    def standings(self, targets: Collection[str] | None = None) -> list[Standing]:
        """Return every strategy of every target, or of these, the highest acceptance first, those without a value last."""
        once = self.read_once()
        names = [name for name in once.registry.list_targets() if targets is None or name in targets]
        found = [standing for name in names for standing in once._of_target(name)]
        return sorted(found, key=lambda one: (one.value is None, -(one.value or 0), one.target, one.strategy))

    def _of_target(self, name: str) -> Iterator[Standing]:
        try:
            target = self.registry.load_target(name)
        except DraftworksError as error:
            yield Standing(name, strategy="", problem=str(error))
            return
        once = replace(self, artifacts=ReadOnceStore(self.artifacts.root, self.artifacts.digests))
        for strategy in target.strategies:
            try:
                yield once._of_strategy(target, strategy)
            except DraftworksError as error:
                yield Standing(name, strategy, problem=str(error))

    def _of_strategy(self, target: TargetSpec, strategy: str) -> Standing:
        report = self.artifacts.find(of_strategy(strategy).report, target.name)
        draft = self.artifacts.find(of_strategy(strategy).draft, target.name)
        if report is None:
            problem = "no draft yet" if draft is None else "no report of its draft yet: run the job `evaluate`"
            return Standing(target.name, strategy, problem=problem)
        latest = read_measured(report)
        earlier = [each for each in self.artifacts.list_all(report.asset, target.name) if each.path != report.path]
        best = find_best(latest, earlier)
        served = self._read_served(target.name, strategy, report)
        try:
            files = resolve_target(target, self.registry, self.digests)
            stale_against = self._stale_against(target, files, {} if draft is None else {strategy: draft})
            draft_changes = () if draft is None else self.list_draft_changes(draft, target, files)
        except DraftworksError as error:
            return Standing(target.name, strategy, latest, best, problem=str(error), served=served)
        return Standing(target.name, strategy, latest, best, stale_against, draft_changes, served=served)

    def _read_served(self, target: str, strategy: str, report: Artifact) -> tuple[ServedScore, ...]:
        """Return the newest serving check of a report's draft; none if there was none."""
        found = self.artifacts.find(of_strategy(strategy).serving, target)
        if found is None or found.identity.get("report") != report.path.name:
            return ()
        served = list_served(found.summary)
        return tuple(
            ServedScore(name_engine(one), one["acceptance"]["micro"], one["walk"]["difference"]) for one in served
        )

    def list_draft_changes(self, draft: Artifact, target: TargetSpec, files: TargetFiles) -> tuple[str, ...]:
        """Return, in words, what has changed since a draft was trained."""
        trained_for = TrainedDraft(draft, target, files, self.registry, self.artifacts, self.digests)
        return tuple(map(str, trained_for.changes()))

    def _stale_against(self, target: TargetSpec, files: TargetFiles, drafts: dict[str, Artifact]) -> tuple[str, ...]:
        """Return what has changed since the report, for the set `heldout` only, on which the shown score was
        measured."""
        responses = {HELDOUT: self.artifacts.find(of_eval_set(HELDOUT).responses, target.name)}
        subject = Subject(files, drafts, responses, self._read_source(target, files))
        return tuple(subject.changes(self.artifacts))

    def _read_source(
        self, target: TargetSpec, files: TargetFiles
    ) -> dict[str, ConversationsIdentity | EvalSetIdentity]:
        """Return what `heldout` would be made from now; nothing if it was never made, or its data cannot be read, which is
        among the changes since the training."""
        if self.artifacts.find(of_eval_set(HELDOUT).conversations, target.name) is None:
            return {}
        try:
            return {HELDOUT: identify_eval_data(HELDOUT, target, files.vocab_size, self.registry, self.digests)}
        except DraftworksError:
            return {}


def read_measured(report: Artifact) -> ReportScore:
    """Return the main score of a report: the walk (rung 3), or simulated_acc_len if there is no walk.

    Raises:
        StoreError: the report is damaged, or of another schema.
    """
    summary = ReportSummary.load(report.path / HELDOUT)
    walks = [score for score in summary.select_scores(TRAINED, WALK_RUNG) if score.value is not None]
    score = (walks or summary.select_scores(TRAINED, SIMULATED_RUNG))[0]
    draft = ReportIdentity.of(report).draft_identity
    return ReportScore(summary.eval_set, score, summary.created.timestamp(), draft, summary.rivals)


def find_best(latest: ReportScore, reports: Sequence[Artifact]) -> ReportScore:
    """Return the highest score of the same metric; of equal scores the earliest."""
    comparable = [found for found in map(_readable, reports) if found and found.score.metric == latest.score.metric]
    return max([latest, *comparable], key=lambda found: (found.score.value, -found.created))


def _readable(report: Artifact) -> ReportScore | None:
    """Return the main score of a report; None if it is damaged or of another schema."""
    try:
        return read_measured(report)
    except DraftworksError as error:
        log.info("not among the best: %s", error)
        return None


TABLE, MARKDOWN, PLOT = "leaderboard.parquet", "leaderboard.md", "leaderboard.png"
MOST_BARS = 30
AGES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
LONGEST_REASON = 200
TEXTS = (
    "served",
    "target",
    "strategy",
    "eval_set",
    "metric",
    "age",
    "rival",
    "draft",
    "stale_against",
    "draft_changes",
    "problem",
)
NUMBERS = ("value", "low", "high", "confidence", "age_s", "best", "rival_value", "rival_difference")
TIMES = ("measured", "best_measured")
CAPTION = (
    f"{NOTE} The metric names the rung of the acceptance ladder, and values of "
    "different metrics do not compare. Intervals are over prompts. The best is of the same metric, over all "
    "reports ever published; its eval data may have been others. For nothing: the best of prompt lookup, suffix decoding, "
    "bigrams and the untrained draft on the same walk, and the draft minus it. Live servers: what SGLang and vLLM accepted of "
    "this draft, and that minus the walk on the same samples. Stale numbers are measured again by the job `evaluate`; a "
    "stale draft was trained for something else than is there now, and stays so until it is trained again."
)


def save(folder: Path, standings: Sequence[Standing], now: float) -> None:
    """Write Parquet, Markdown and chart into `folder`, each atomically. Without any value there is no chart."""
    with publish_file(folder / TABLE) as staging:
        frame(standings, now).to_parquet(staging)
    with publish_file(folder / MARKDOWN) as staging:
        staging.write_text(markdown(standings), encoding="utf-8")
    picture = plot(standings)
    if picture is None:
        (folder / PLOT).unlink(missing_ok=True)
        return
    with publish_file(folder / PLOT) as staging:
        staging.write_bytes(picture)


def frame(standings: Sequence[Standing], now: float) -> pd.DataFrame:
    """Return a data frame with a row per standing. `now` is in seconds since the epoch; column `draft` is the
    name of the draft."""
    import pandas as pd

    columns = ("target", "strategy", "eval_set", "metric", "value", "low", "high", "confidence", "prompts")
    columns += (
        "measured",
        "age_s",
        "age",
        "best",
        "best_measured",
        "rival",
        "rival_value",
        "rival_difference",
        "served",
        "draft",
    )
    columns += ("stale_against", "draft_changes", "problem")
    found = pd.DataFrame([_row(standing, now) for standing in standings], columns=columns)
    kinds = {**dict.fromkeys(TEXTS, "string"), **dict.fromkeys(NUMBERS, "float64"), "prompts": "Int64"}
    times = {name: pd.to_datetime(found[name], unit="s", utc=True) for name in TIMES}
    return found.astype(kinds).assign(**times)


def _row(standing: Standing, now: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": standing.target,
        "strategy": standing.strategy,
        "stale_against": ", ".join(standing.stale_against),
        "draft_changes": ", ".join(standing.draft_changes),
        "problem": standing.problem,
        "served": ", ".join(map(_describe_served, standing.served)),
    }
    latest, best = standing.latest, standing.best
    if latest is not None and best is not None:
        names = ("metric", "value", "low", "high", "confidence", "prompts")
        row |= {name: getattr(latest.score, name) for name in names}
        row |= {"eval_set": latest.eval_set, "draft": latest.draft, "measured": latest.created}
        row |= {"age_s": now - latest.created, "age": format_age(now - latest.created)}
        row |= {"best": best.score.value, "best_measured": best.created}
        if latest.rivals is not None:
            rivals = latest.rivals
            row |= {"rival": rivals.rival, "rival_value": rivals.rival_accepted, "rival_difference": rivals.difference}
    return row


def cells(standing: Standing, now: float | None = None) -> dict[str, str]:
    """Return the texts of one row: with the age at `now`, or with the date of the measurement if `now` is None."""
    latest, best = standing.latest, standing.best
    return {
        "target": standing.target,
        "strategy": standing.strategy,
        NAME: _with_interval(latest) if latest else "",
        "metric": f"{name_metric(latest.score.metric)}, {latest.eval_set}" if latest else "",
        "prompts": f"{latest.score.prompts:,}" if latest and latest.score.prompts is not None else "",
        **_when(latest.created if latest else None, now),
        "best ever": f"{format_length(best.score.value)} ({_day(best.created)})" if best else "",
        "for nothing": _describe_rival(latest.rivals) if latest else "",
        "live servers": ", ".join(map(_describe_served, standing.served)),
        "draft": (latest.draft or "") if latest else "",
        "stale against": _stale(standing),
    }


def _describe_rival(found: RivalVerdict | None) -> str:
    """Return the best that costs nothing, and the draft's acceptance length minus its; empty where it was not measured."""
    if found is None:
        return ""
    return f"{found.rival} {format_length(found.rival_accepted)} ({format_change(found.difference, digits=2)})"


def _describe_served(found: ServedScore) -> str:
    """Return the acceptance length in a server, and what it differs by from the walk on the same samples."""
    return f"{found.engine} {format_length(found.accepted, none='–')} ({format_change(found.from_walk, digits=2)})"


def _when(created: float | None, now: float | None) -> dict[str, str]:
    if now is None:
        return {"measured": "" if created is None else f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d %H:%M} UTC"}
    return {"age": "" if created is None else format_age(now - created)}


def markdown(standings: Sequence[Standing]) -> str:
    """Return a Markdown table in the order given, with the caption."""
    if not standings:
        return "No target in the registry.\n"
    return f"{render_table(map(cells, standings))}\n\n{CAPTION}\n"


def plot(standings: Sequence[Standing]) -> bytes | None:
    """Return a PNG with a bar and interval for each of the first MOST_BARS drafts with a value; None if there is
    none."""
    from draftworks.evaluation.report.plots import COLOURS, label_axes, make_figure, render_png

    measured = {f"{one.target} · {one.strategy}": one.latest for one in standings if one.latest is not None}
    shown = list(measured.values())[:MOST_BARS]
    if not shown:
        return None
    figure = make_figure(6.4, 1.4 + 0.26 * len(shown))
    axes = figure.add_subplot()
    metrics = sorted({one.score.metric for one in shown})
    for metric, colour in zip(metrics, COLOURS):
        places = [place for place, one in enumerate(shown) if one.score.metric == metric]
        lengths = [count_own_token(shown[place].score.value or 0.0) for place in places]
        axes.barh(places, lengths, color=colour, label=name_metric(metric))
    for place, one in enumerate(shown):
        if one.score.low is not None and one.score.high is not None and _has_interval(one):
            interval = [count_own_token(one.score.low), count_own_token(one.score.high)]
            axes.plot(interval, [place, place], color="black", linewidth=1.5)
    axes.set_yticks(range(len(shown)), list(measured)[: len(shown)])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    figure.legend(loc="outside lower center", frameon=False)
    title = (
        "leaderboard" if len(shown) == len(measured) else f"leaderboard: the first {len(shown)} of {len(measured):,}"
    )
    label_axes(axes, title, NAME, "")
    return render_png(figure)


def format_age(seconds: float) -> str:
    """Return an age in its largest unit: 7300 -> '2 h'. Negative ages, from clocks that differ, are shown as 0."""
    whole = max(int(seconds), 0)
    unit, length = next(((unit, length) for unit, length in AGES if whole >= length), AGES[-1])
    return f"{whole // length} {unit}"


def _has_interval(measured: ReportScore) -> bool:
    """Whether to show the interval: over one prompt it has no width, which would look exact."""
    return measured.score.low is not None and measured.score.prompts != 1


def _with_interval(measured: ReportScore) -> str:
    score, length = measured.score, format_length(measured.score.value)
    if score.low is None or score.high is None or not _has_interval(measured):
        return length
    return f"{length} ({format_interval(score.low, score.high, between='–')})"


def _day(created: float) -> str:
    return f"{datetime.fromtimestamp(created, UTC):%Y-%m-%d}"


def _stale(standing: Standing) -> str:
    """Return what has changed since report and training, or the first line of the problem."""
    reasons = [f"numbers: {', '.join(standing.stale_against)}"] if standing.stale_against else []
    if standing.draft_changes:
        reasons.append(f"draft: {', '.join(standing.draft_changes)}")
    if standing.problem is not None:
        line = standing.problem.splitlines()[0]
        reasons.append(line if len(line) <= LONGEST_REASON else f"…{line[1 - LONGEST_REASON :]}")
    return "; ".join(reasons)
