"""Plots of a report as PNG bytes, without a display. The colours are Okabe and Ito's, safe for colour blindness."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

from draftworks.evaluation.acceptance_length import NAME, SYMBOL, count_own_token, format_length, name_metric
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean, sum_histograms
from draftworks.evaluation.report.figures import SIMULATED, WALK

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from draftworks.evaluation.ladder.measurement import DraftMeasurement
    from draftworks.evaluation.result import EvalResult

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")
Style: TypeAlias = tuple[str, str]  # colour, marker


def plot_acceptance(drafts: Mapping[str, DraftMeasurement], draft_tokens: int, title: str) -> bytes:
    """Plot the teacher-forced accuracy by draft position, and the passes of the walk by accepted tokens, if measured."""
    drafts = select_shown_drafts(drafts)
    walked = {name: counts for name, measured in drafts.items() if any(counts := sum_histograms(measured.walk))}
    styles = dict(zip(drafts, cycle(zip(COLOURS, MARKERS))))
    figure = make_figure(10.4 if walked else 6.4, 3.8)
    axes = figure.subplots(1, 2 if walked else 1, squeeze=False)[0]
    _draw_accuracies(axes[0], {name: one.result for name, one in drafts.items() if one.result is not None}, styles)
    label_axes(axes[0], title, "draft position", "equal to the target's argmax (%)")
    if walked:
        _draw_accepted_lengths(axes[1], walked, draft_tokens, styles)
        label_axes(axes[1], "", "draft tokens accepted by a pass", "passes of the walk (%)")
    return render_png(figure)


def select_shown_drafts(drafts: Mapping[str, DraftMeasurement]) -> dict[str, DraftMeasurement]:
    """Return the drafts with accuracies, and of those that propose without a model the one that accepts most."""
    walks = {name: micro_mean(measured.walk) for name, measured in drafts.items() if measured.result is None}
    best = max(walks, key=lambda name: walks[name] or 0.0, default=None)
    return {name: measured for name, measured in drafts.items() if measured.result is not None or name == best}


def plot_slices(slices: pd.DataFrame, title: str) -> bytes:
    """Plot the walk of each slice that has a pass, with its interval, in the order of the table."""
    measured = slices[slices["passes"] > 0]
    rows = range(len(measured))
    figure = make_figure(6.4, 1.4 + 0.26 * len(measured))
    axes = figure.add_subplot()
    low, middle, high = ([count_own_token(each) for each in measured[name]] for name in ("low", "micro", "high"))
    axes.hlines(rows, low, high, color=COLOURS[0], alpha=0.5)
    axes.plot(middle, rows, color=COLOURS[0], marker=MARKERS[0], linestyle="")
    columns = (measured["column"], measured["value"], measured["prompts"])
    names = [f"{column} = {value:.30}  (n = {prompts:,})" for column, value, prompts in zip(*columns, strict=True)]
    axes.set_yticks(rows, [name.replace("$", r"\$") for name in names])  # a dollar would start a formula
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlim(count_own_token(0.0), max(1.05 * max(high, default=0.0), 1.1))
    label_axes(axes, title, f"{NAME}, {name_metric(WALK)}", "")
    return render_png(figure)


def _draw_accuracies(axes: Axes, results: Mapping[str, EvalResult], styles: Mapping[str, Style]) -> None:
    for name, result in results.items():
        colour, marker = styles[name]
        percents = [100 * accuracy for accuracy in result.per_position_acc]
        text = f"{name} ({format_length(result.simulated_acc_len)})"
        axes.plot(range(1, len(percents) + 1), percents, color=colour, marker=marker, label=text)
    axes.set_xticks(range(1, 1 + max((len(result.correct) for result in results.values()), default=0)))
    axes.set_ylim(bottom=0)
    axes.legend(title=f"draft ({SYMBOL}, {name_metric(SIMULATED)})", frameon=False)


def _draw_accepted_lengths(
    axes: Axes, walked: Mapping[str, Sequence[int]], draft_tokens: int, styles: Mapping[str, Style]
) -> None:
    """Draw the bars of all drafts side by side at each accepted length."""
    width = 0.8 / len(walked)
    for index, (name, counts) in enumerate(walked.items()):
        passes = sum(counts)
        mean = sum(length * count for length, count in enumerate(counts)) / passes
        places = [length + (index - (len(walked) - 1) / 2) * width for length in range(len(counts))]
        heights = [100 * count / passes for count in counts]
        axes.bar(places, heights, width, color=styles[name][0], label=f"{name} ({format_length(mean)})")
    axes.set_xticks(range(max(draft_tokens + 1, *map(len, walked.values()))))
    axes.legend(title=f"draft ({SYMBOL}, {name_metric(WALK)})", frameon=False)


def make_figure(width: float, height: float) -> Figure:
    """Make an empty figure of a size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Set the title and axis labels, and draw a light grid."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def render_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
