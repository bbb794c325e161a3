"""A comparison of two drafts as Markdown, as a self-contained HTML page, as a picture and as JSON."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.evaluation.acceptance_length import NAME, format_change, format_interval, format_length, name_metric
from draftworks.evaluation.ladder.statistics import AcceptanceSummary
from draftworks.evaluation.report.figures import WALK
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.report.plots import COLOURS, MARKERS, label_axes, make_figure, render_png
from draftworks.evaluation.report.text_tables import TextTable, fill, render_text_table
from draftworks.fleet.compared_drafts import ComparedDraft, ReportPlace
from draftworks.fleet.draft_comparison import Difference, DraftComparison, EvalSetFigures, Kind

_MAX_CELL_LENGTH = 60
_NOTE = (
    f"A and B are the {NAME} of the walk (rung 3), which counts the target's own token; differences are A minus B, with 95% "
    "intervals over prompts. Paired: on prompts with the same tokens in both reports."
)
_SLICES_NOTE = "Of many slices, about one in twenty has an interval without 0 by chance alone."
_STYLE = (
    "body{font-family:sans-serif;max-width:72em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}img{max-width:100%}"
)


@dataclass(frozen=True)
class _Section:
    """A part of the page: a title, paragraphs, and a table with a row per mapping."""

    title: str
    text: tuple[str, ...] = ()
    rows: tuple[Mapping[str, str], ...] = ()


def render_markdown(found: DraftComparison, picture: str | None = None, width: int | None = None) -> str:
    """Return the comparison as Markdown.

    Args:
        picture: path of the picture as the file is to name it; None: without one.
        width: characters of a line of the terminal: a table that is wider becomes a list. None: tables of any width.
    """
    parts = [f"# {_title(found)}"]
    for section in _iterate_sections(found):
        parts += [f"## {section.title}", *("\n".join(fill(text, width)) for text in section.text)]
        parts += [_render_rows(section.rows, width)] if section.rows else []
        parts += [f"![differences]({picture})"] if picture is not None and section.title == "Figures" else []
    return "\n\n".join(parts) + "\n"


def render_html(found: DraftComparison, picture: bytes | None = None) -> str:
    """Return the comparison as one HTML file that holds its picture, a PNG."""
    title = html.escape(_title(found))
    parts = [f"<h1>{title}</h1>"]
    for section in _iterate_sections(found):
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
        parts += [_render_html_table(section.rows)] if section.rows else []
        if picture is not None and section.title == "Figures":
            data = base64.b64encode(picture).decode()
            parts.append(f'<p><img alt="differences" src="data:image/png;base64,{data}"></p>')
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def describe_comparison(found: DraftComparison) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "a": _describe_side(found.a, found.reports.a),
        "b": _describe_side(found.b, found.reports.b),
        "metric": WALK,
        "verdict": found.verdict,
        "notes": list(found.notes),
        "recipe": [asdict(one) for one in found.recipe],
        "data": [asdict(one) for one in found.data],
        "costs": {"a": found.costs[0].to_json(), "b": found.costs[1].to_json()},
        "eval_sets": [_describe_figures(one) for one in found.figures],
    }


def _describe_side(side: ComparedDraft, place: ReportPlace | None) -> dict[str, Any]:
    return {
        "given": side.given,
        "target": side.target,
        "strategy": side.strategy,
        "draft": None if side.draft is None else side.draft.path.name,
        "weights_of_target": side.weights_of_target,
        "report": None if place is None else str(next(iter(place.folders.values())).parent),
    }


def _describe_figures(one: EvalSetFigures) -> dict[str, Any]:
    return {
        "eval_set": one.eval_set,
        "verdict": one.verdict.value,
        "kind": one.kind.value,
        "a": None if one.a is None else one.a.to_json(),
        "b": None if one.b is None else one.b.to_json(),
        "a_draft_tokens": one.a_draft_tokens,
        "b_draft_tokens": one.b_draft_tokens,
        "shared_prompts": one.shared,
        "shared_a": None if one.paired is None else one.paired.a,
        "shared_b": None if one.paired is None else one.paired.b,
        "difference": one.difference,
        "low": None if one.interval is None else one.interval.low,
        "high": None if one.interval is None else one.interval.high,
        "confidence": None if one.interval is None else one.interval.confidence,
        "reason": one.reason,
        "slices": [{name: value for name, value in asdict(each).items() if name != "p_value"} for each in one.slices],
    }


def _title(found: DraftComparison) -> str:
    return f"A {found.a.name}, B {found.b.name}"


def _iterate_sections(found: DraftComparison) -> Iterator[_Section]:
    of_sets = () if found.is_of_one_draft else tuple(one.describe() for one in found.figures)
    yield _Section("Verdict", (found.verdict, *found.notes, *of_sets))
    figures = tuple(_build_figures_row(one) for one in found.figures)
    yield _Section("Figures", (_NOTE,), figures)
    slices = tuple(row for one in found.figures for row in _build_slice_rows(one))
    if slices:
        yield _Section("Slices", (_SLICES_NOTE,), slices)
    yield _list_differences("Recipe", "The recipes are equal.", found.recipe)
    yield _list_differences("Data", "The data are equal.", found.data)
    yield _Section("Size and training", (), tuple(_build_cost_rows(found)))


def _render_rows(rows: Sequence[Mapping[str, str]], width: int | None) -> str:
    """Return a Markdown table, or, where a line of it is longer than `width`, one that fits a terminal."""
    table = render_table(rows, max_cell_length=_MAX_CELL_LENGTH)
    if width is None or max(map(len, table.splitlines())) <= width:
        return table
    return render_text_table(TextTable.of("", rows), width)


def _build_figures_row(one: EvalSetFigures) -> dict[str, str]:
    is_paired = one.kind is Kind.PAIRED
    difference = "" if one.difference is None else format_change(one.difference)
    interval = "" if one.interval is None else f"{one.interval.low:+z.3f} to {one.interval.high:+z.3f}"
    return {
        "eval set": one.eval_set,
        "A, all its prompts": _format_side(one.a),
        "B, all its prompts": _format_side(one.b),
        "prompts in common": f"{one.shared:,}",
        "A on these": "" if one.paired is None else format_length(one.paired.a, 3),
        "B on these": "" if one.paired is None else format_length(one.paired.b, 3),
        "A - B": difference,
        "95% interval": interval if is_paired or not interval else f"{interval} (unpaired)",
        "verdict": one.verdict.value,
    }


def _build_slice_rows(one: EvalSetFigures) -> Iterator[dict[str, str]]:
    for each in one.slices:
        yield {
            "eval set": one.eval_set,
            "slice": f"{each.column} = {each.value}",
            "prompts": f"{each.prompts:,}",
            "A": format_length(each.a, 3),
            "B": format_length(each.b, 3),
            "A - B": f"{each.difference:+z.3f}",
            "95% interval": f"{each.low:+z.3f} to {each.high:+z.3f}",
        }


def _list_differences(title: str, equal: str, differences: tuple[Difference, ...]) -> _Section:
    rows = tuple({"key": one.key, "A": _format_value(one.a), "B": _format_value(one.b)} for one in differences)
    return _Section(title, () if rows else (equal,), rows)


def _build_cost_rows(found: DraftComparison) -> Iterator[dict[str, str]]:
    a, b = (cost.to_json() for cost in found.costs)
    for key in a:
        yield {"": key.replace("_", " "), "A": _format_count(a[key]), "B": _format_count(b[key])}


def _render_html_table(rows: tuple[Mapping[str, str], ...]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "</tr>"]
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in names) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _format_side(side: AcceptanceSummary | None) -> str:
    if side is None or side.micro is None or side.low is None or side.high is None:
        return "not measured"
    return f"{format_length(side.micro, 3)} ({format_interval(side.low, side.high, 3)}, n = {side.prompts:,})"


def _format_value(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _format_count(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


MAX_LINES = 60
"""Lines of a picture; slices beyond are in the table only."""


@dataclass(frozen=True)
class _Line:
    name: str
    difference: float
    low: float
    high: float
    is_whole_set: bool


def plot_differences(found: DraftComparison) -> bytes | None:
    """Return a PNG with a line per eval set and slice, A minus B; None if no difference was computed."""
    found_lines = _list_lines(found)
    lines = found_lines[:MAX_LINES]
    if not lines:
        return None
    figure = make_figure(7.2, 1.4 + 0.28 * len(lines))
    axes = figure.add_subplot()
    for row, line in enumerate(lines):
        colour, marker = (COLOURS[0], MARKERS[0]) if line.is_whole_set else (COLOURS[1], MARKERS[1])
        axes.hlines(row, line.low, line.high, color=colour, alpha=0.6)
        axes.plot([line.difference], [row], color=colour, marker=marker, linestyle="")
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(lines)), [line.name.replace("$", r"\$") for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    title = f"A {found.a.name} minus B {found.b.name}".replace("$", r"\$")
    title += f": the first {len(lines)} of {len(found_lines):,}" if len(lines) < len(found_lines) else ""
    label_axes(axes, title, f"difference in {NAME}, {name_metric(WALK)}, 95% interval", "")
    return render_png(figure)


def _list_lines(found: DraftComparison) -> list[_Line]:
    lines = list[_Line]()
    for one in found.figures:
        if one.difference is None or one.interval is None:
            continue
        count = f"n = {one.shared:,}" if one.kind is Kind.PAIRED else "unpaired"
        lines.append(_Line(f"{one.eval_set}  ({count})", one.difference, one.interval.low, one.interval.high, True))
        for each in one.slices:
            name = f"{each.column} = {each.value:.30}  (n = {each.prompts:,})"
            lines.append(_Line(name, each.difference, each.low, each.high, False))
    return lines
