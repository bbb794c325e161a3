"""The picture of a decision: the loss on each eval set with its interval, against both margins. PNG, without a display."""

from __future__ import annotations

from draftworks.decision.record import Choice, Decision
from draftworks.evaluation.acceptance_length import NAME
from draftworks.evaluation.report.plots import COLOURS, label_axes, make_figure, render_png

COLOUR_OF = {
    Choice.KEEP: COLOURS[2],
    Choice.UNDECIDED: COLOURS[4],
    Choice.TUNE: COLOURS[1],
    Choice.RETRAIN: COLOURS[5],
}
MARKER_OF = {Choice.KEEP: "o", Choice.UNDECIDED: "D", Choice.TUNE: "^", Choice.RETRAIN: "s"}


def plot_decision(decision: Decision) -> bytes:
    """Plot the eval sets in their order from above, the margins as lines."""
    figures, margins = decision.figures, decision.margins
    figure = make_figure(7.2, 1.7 + 0.4 * len(figures))
    axes = figure.add_subplot()
    for row, found in enumerate(figures):
        if found.loss is None or found.low is None or found.high is None:
            axes.text(0, row, "  nothing to compare with", va="center", fontsize=8)
            continue
        colour = COLOUR_OF[found.choice]
        axes.hlines(row, found.low, found.high, color=colour, linewidth=3, alpha=0.5)
        axes.plot([found.loss], [row], color=colour, marker=MARKER_OF[found.choice], linestyle="")
    axes.axvline(margins.tune, color=COLOURS[1], linestyle="--", label=f"tune above {margins.tune:g}")
    axes.axvline(margins.retrain, color=COLOURS[5], linestyle=":", label=f"retrain above {margins.retrain:g}")
    axes.axvline(0, color="black", linewidth=0.8)
    names = [f"{found.eval_set}: {found.choice}  (n = {found.prompts:,})" for found in figures]
    axes.set_yticks(range(len(figures)), names)
    axes.set_ylim(len(figures) - 0.5, -0.5)
    title = f"{decision.target}, {decision.strategy}, draft {decision.draft}: {decision.choice}"
    label_axes(axes, title, f"loss of {NAME} (95% interval)", "")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return render_png(figure)
