"""The files of a report: its page, JSON, Parquet tables, plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.decoding import GREEDY, describe_servers
from draftworks.evaluation.acceptance_length import SYMBOL, format_change, format_length, name_metric
from draftworks.evaluation.labels import NEAR_TIE
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import (
    Difference,
    PromptsByPosition,
    describe_range,
    micro_mean,
    sum_histograms,
)
from draftworks.evaluation.ladder.statistics import Interval, Resampling, compare_unpaired, select_measured
from draftworks.evaluation.report.figures import WALK, Figure
from draftworks.evaluation.report.pages import format_measured, render_page, render_table
from draftworks.evaluation.report.plots import plot_acceptance, plot_slices, select_shown_drafts
from draftworks.evaluation.report.report import NOT_MEASURED, Report
from draftworks.evaluation.report.slices import POSITION
from draftworks.evaluation.report.summary import (
    DIFFERENCES,
    MARKDOWN,
    PLOT,
    PROMPTS,
    REPORT,
    SLICES,
    SLICES_PLOT,
    TABLE,
    TRAINED,
)
from draftworks.evaluation.report.tables import (
    build_differences_table,
    build_prompts_table,
    build_slices_table,
    build_summary_table,
    publish_table,
    select_slices_to_show,
)
from draftworks.evaluation.rivals.loops import NGRAM
from draftworks.evaluation.rivals.names import RIVAL_MEANINGS
from draftworks.evaluation.strategy_metrics import RATES_RULE, describe_contexts, describe_rules
from draftworks.storage.artifacts import FileManifest
from draftworks.storage.files import publish_file, publish_json

MAX_SHOWN_DIFFERENCES = 12
MAX_CELL_LENGTH = 40
LEAST_PROMPTS = 5
"""Prompts of a range below which nothing is said of it: their interval would be too narrow."""
CLEAR_SHARE = 0.75
"""A range that accepts less than this share of the first one's, and whose interval says that it is less, is a fall."""


@dataclass(frozen=True)
class LateFall:
    """A later range in which the draft accepts clearly less than in the first one that was measured.

    Attributes:
        first, late: begins of the two ranges.
        before, after: accepted tokens per pass in them.
        interval: of the difference, after - before. The prompts of the ranges are not the same ones.
    """

    first: int
    late: int
    before: float
    after: float
    interval: Interval

    def describe(self) -> str:
        """Return a sentence on the fall and what helps."""
        return (
            f"**Late in the text the draft accepts less:** {SYMBOL} {format_length(self.after)} at {describe_range(self.late)}, "
            f"{format_length(self.before)} at {describe_range(self.first)} (95% interval of the difference {self.interval.low:+.2f} to {self.interval.high:+.2f}). Train it on samples as long "
            "as what is served (`data.max_length`), or with a `sliding_window`."
        )


def find_late_fall(walk: PromptsByPosition, resampling: Resampling) -> LateFall | None:
    """Return the fall in the last range with enough prompts; None if there is none."""
    known = {begin: prompts for begin, prompts in walk.items() if len(select_measured(prompts)) >= LEAST_PROMPTS}
    if len(known) < 2:
        return None
    first, late = min(known), max(known)
    found = compare_unpaired(known[late], known[first], resampling)
    if found is None or found.a >= CLEAR_SHARE * found.b or found.interval.high >= 0:
        return None
    return LateFall(first, late, found.b, found.a, found.interval)


def render_report(report: Report) -> str:
    """Return the report as Markdown."""
    return render_page(
        "evaluation/report/report.md.j2",
        report=report,
        draft_table=_table(_draft_row(name, report.figures) for name, one in report.drafts.items() if one.result),
        rival_table=_table(_list_rival_rows(report)),
        rival_meanings={name: RIVAL_MEANINGS[name] for name in report.drafts if name in RIVAL_MEANINGS},
        loop_ngram=NGRAM,
        rungs=sorted({found.rung for found in report.figures}),
        decoded=list(_list_decoded(report.drafts)),
        loops=[loop for measured in report.drafts.values() for loop in measured.loops if loop.prompts],
        thinking_table="" if report.thinking is None else _table(_list_thinking_rows(report)),
        histogram=_table(_list_histogram_rows(report)),
        difference_table=_render_differences,
        describe_decoding=_describe_decoding,
        format_speed_up=_format_speed_up,
        max_differences=MAX_SHOWN_DIFFERENCES,
        not_measured=NOT_MEASURED,
        near_tie=round(1 / NEAR_TIE),
        files={"differences": DIFFERENCES, "slices": SLICES},
        **_describe_sampling(report),
        **_describe_slices(report),
    )


def _describe_sampling(report: Report) -> dict[str, Any]:
    """Return what is said of temperatures above 0: the rules of acceptance, the contexts of rung 1, and the acceptance rates."""
    sampled = [found for found in report.figures if found.decoding is not None and found.rule is not None]
    simulated = (each.decoding for each in sampled if each.rung == 1 and each.decoding)
    measured = {name: each.result.acceptance_rates for name, each in report.drafts.items() if each.result is not None}
    rates = {name: each for name, each in measured.items() if each is not None and each.unconditional is not None}
    rows = [
        {
            "draft": name,
            "acceptance rate % by position, where the label is in the draft's vocabulary": _format_percentages(
                each.conditional
            ),
            "over all positions": _format_percentages(each.unconditional or ()),
        }
        for name, each in rates.items()
    ]
    return {
        "rules": describe_rules({found.rule: found.servers for found in sampled if found.rule is not None}),
        "contexts": describe_contexts(simulated, report.answers),
        "rates_table": _table(rows),
        "rates_rule": f"`{RATES_RULE}` ({describe_servers(report.strategy, RATES_RULE)})",
        "coverage": [each.coverage for each in rates.values()][-1] if rates else 0.0,
    }


def _describe_slices(report: Report) -> dict[str, Any]:
    """Return the walk by columns of the eval data, and by place in the text, where there is more than one slice."""
    shown, left_out = select_slices_to_show(report.walk_slices)
    has_positions = POSITION in set(shown["column"])
    fall = find_late_fall(report.drafts[TRAINED].walk_by_position, report.resampling) if has_positions else None
    return {
        "slice_table": _table(_slice_row(one) for one in shown.itertuples()),
        "left_out": left_out,
        "positions": POSITION if has_positions else "",
        "fall": "" if fall is None else fall.describe(),
    }


def _table(rows: Iterable[Mapping[str, str]]) -> str:
    return render_table(rows, max_cell_length=MAX_CELL_LENGTH)


def _describe_decoding(found: Figure) -> str:
    """Return how a loop chose its tokens: `greedy`, or `temperature 0.7, greedy_draft as vLLM 0.33`."""
    rule = "" if found.rule is None else f", {found.rule}{_describe_servers(found)}"
    return f"{(found.decoding or GREEDY).describe()}{rule}"


def _describe_servers(found: Figure) -> str:
    """Return the servers whose rule a number above temperature 0 is by; else an empty text."""
    return "" if found.rule is None else f" as {found.servers}"


def _draft_row(draft: str, figures: Iterable[Figure]) -> dict[str, str]:
    """Return the row of a draft, with a column per number."""
    found = [each for each in figures if each.draft == draft]
    accuracies = _format_percentages(each.value for each in found if each.rung == 0 and each.value is not None)
    row = {"draft": draft, "accuracy % by position (rung 0)": accuracies}
    for each in found:
        if each.rung > 0:
            length = (
                format_length(each.value) if each.acceptance is None else format_measured(each.acceptance, each.value)
            )
            row[f"{_title(each.metric)}{_describe_servers(each)}"] = length
        if each.rung == 4:
            row[f"speed-up ({_describe_decoding(each)})"] = _format_speed_up(each.speed_up)
    return row


def _title(metric: str) -> str:
    """Return the heading of a column of acceptance lengths."""
    return f"{SYMBOL}, {name_metric(metric)}"


def _format_percentages(shares: Iterable[float]) -> str:
    return " · ".join(f"{100 * share:.1f}" for share in shares)


def _list_rival_rows(report: Report) -> Iterator[dict[str, str]]:
    """Yield the walk of all drafts that have one, the longest first; nothing where there is only one."""
    walks = [one for one in report.figures if one.metric == WALK and one.acceptance is not None]
    differences = {one.other: one.paired for one in report.comparisons}
    without = report.walk_without_loops if report.loops is not None and report.loops.in_loops else {}
    for one in sorted(walks if differences else (), key=lambda one: -(one.value or 0.0)):
        loops = {f"{SYMBOL} without answers in loops": format_length(without[one.draft])} if without else {}
        found = differences.get(one.draft)
        change = "" if found is None else format_change(found.difference, found.interval.low, found.interval.high, 2)
        yield {
            "beside each other": one.draft,
            _title(WALK): format_measured(one.acceptance, one.value),
            **loops,
            f"{TRAINED} minus it, prompt by prompt": change,
        }


def _list_thinking_rows(report: Report) -> Iterator[dict[str, str]]:
    """Yield the walk with thinking on and off."""
    assert report.thinking is not None, "asked by the caller"
    for way, one in (("on", report.thinking.on), ("off", report.thinking.off)):
        yield {"thinking": way, **_walk_cells(one)}


def _slice_row(one: Any) -> dict[str, str]:
    row = {"slice by": one.column, "value": one.value, **_walk_cells(one)}
    if one.rival is None:
        return row
    wins = ", wins" if one.difference_high < 0 and one.difference_high > one.difference_low else ""
    return {**row, "the best other": f"{one.rival} {format_length(one.rival_micro)}{wins}"}


def _walk_cells(one: Any) -> dict[str, str]:
    """Return how many prompts and passes are behind the walk of the trained draft, and what it accepts of them."""
    length = format_measured(one, one.micro) if one.passes else "none"
    return {"prompts": f"{one.prompts:,}", "passes": f"{one.passes:,}", f"{_title(WALK)}, {TRAINED}": length}


def _list_histogram_rows(report: Report) -> Iterator[dict[str, str]]:
    """Yield the share of passes of each walk by the number of accepted draft tokens, in percent."""
    for name, measured in select_shown_drafts(report.drafts).items():
        counts = sum_histograms(measured.walk)
        if any(counts):
            shares = {str(length): f"{100 * count / sum(counts):.0f}" for length, count in enumerate(counts)}
            nothing = {str(length): "0" for length in range(report.draft_tokens + 1)}
            yield {"% of passes of the walk by draft tokens accepted": name, **nothing, **shares}


def _format_speed_up(speed_up: float | None) -> str:
    return "none" if speed_up is None else f"{speed_up:.2f}×"


def _list_decoded(drafts: Mapping[str, DraftMeasurement]) -> Iterator[dict[str, Any]]:
    """Yield what the walk is on the prompts that a greedy loop decoded, where these are not all: only so they compare."""
    for name, measured in drafts.items():
        greedy = [loop for loop in measured.loops if not loop.decoding.temperature]
        decoded = {prompt.sample_id for loop in greedy for prompt in loop.prompts}
        same = [prompt for prompt in measured.walk if prompt.sample_id in decoded]
        if same and len(same) < len(measured.walk):
            yield {"draft": name, "prompts": len(same), "of": len(measured.walk), "accepted": micro_mean(same)}


def _render_differences(loop: LoopMeasurement) -> str:
    return _table(map(_difference_row, (loop.differences or ())[:MAX_SHOWN_DIFFERENCES]))


def _difference_row(one: Difference) -> dict[str, str]:
    what = "answer" if one.pass_number is None else f"proposal of pass {one.pass_number}, same answer"
    return {
        "prompt that differs": one.sample_id,
        "in": what,
        "at token (from 0)": str(one.position),
        "walk": _format_token(one.walk),
        "loop": _format_token(one.loop),
        "top-2 gap": "unknown" if one.gap is None else f"{one.gap:.2g} ({one.whose})",
    }


def _format_token(token: int | None) -> str:
    return "ended" if token is None else str(token)


def save_report(report: Report, folder: Path) -> None:
    """Write all files of a report into `folder`, each atomically, report.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    heading = {"target": report.target, "strategy": report.strategy, "eval_set": report.eval_set}
    publish_table(folder / TABLE, build_summary_table(heading, report.figures))
    publish_table(folder / PROMPTS, build_prompts_table(report.drafts))
    publish_table(folder / SLICES, build_slices_table(report.walk_slices))
    publish_table(folder / DIFFERENCES, build_differences_table(report.drafts))
    with publish_file(folder / MARKDOWN) as staging:
        staging.write_text(render_report(report), encoding="utf-8")
    with publish_file(folder / PLOT) as staging:
        staging.write_bytes(plot_acceptance(report.drafts, report.draft_tokens, report.title))
    _save_slices_plot(report, folder / SLICES_PLOT)
    written = FileManifest.record(folder, (TABLE, PROMPTS, SLICES, DIFFERENCES))
    publish_json(folder / REPORT, {**report.to_json(), "files": written.digests})


def _save_slices_plot(report: Report, path: Path) -> None:
    """Write the plot of the slices; without a pass to show, remove an old one."""
    shown, left_out = select_slices_to_show(report.walk_slices)
    if not (shown["passes"] > 0).to_numpy().any():
        path.unlink(missing_ok=True)
        return
    with publish_file(path) as staging:
        staging.write_bytes(plot_slices(shown, f"{report.title}{', the largest slices' if left_out else ''}"))
