"""The leaderboard as Parquet, Markdown, cells for a terminal, and a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.evaluation.acceptance_length import (
    NAME,
    NOTE,
    count_own_token,
    format_interval,
    format_length,
    name_metric,
)
from draftworks.evaluation.report.markdown_tables import render_table
from draftworks.fleet.leaderboard import ReportScore, Standing
from draftworks.storage.files import publish_file

if TYPE_CHECKING:
    import pandas as pd

TABLE, MARKDOWN, PLOT = "leaderboard.parquet", "leaderboard.md", "leaderboard.png"
MOST_BARS = 30
AGES = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
LONGEST_REASON = 200
TEXTS = ("target", "strategy", "eval_set", "metric", "age", "draft", "stale_against", "draft_changes", "problem")
NUMBERS = ("value", "low", "high", "confidence", "age_s", "best")
TIMES = ("measured", "best_measured")
CAPTION = (
    f"{NOTE} The metric names the rung of the acceptance ladder, and values of "
    "different metrics do not compare. Intervals are over prompts. The best is of the same metric, over all "
    "reports ever published; its eval data may have been others. Stale numbers are measured again by the job `evaluate`; a "
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
    columns += ("measured", "age_s", "age", "best", "best_measured", "draft")
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
    }
    latest, best = standing.latest, standing.best
    if latest is not None and best is not None:
        names = ("metric", "value", "low", "high", "confidence", "prompts")
        row |= {name: getattr(latest.score, name) for name in names}
        row |= {"eval_set": latest.eval_set, "draft": latest.draft, "measured": latest.created}
        row |= {"age_s": now - latest.created, "age": format_age(now - latest.created)}
        row |= {"best": best.score.value, "best_measured": best.created}
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
        "draft": (latest.draft or "") if latest else "",
        "stale against": _stale(standing),
    }


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
