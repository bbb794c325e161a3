"""Picture of the differences between two drafts on each eval set and slice, with their intervals."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.evaluation.acceptance_length import NAME, name_metric
from draftworks.evaluation.report.findings import WALK
from draftworks.evaluation.report.plots import COLOURS, MARKERS, label_axes, make_figure, render_png
from draftworks.fleet.draft_comparison import DraftComparison, Kind

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
