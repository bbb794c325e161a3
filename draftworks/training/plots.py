"""Training curves as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftworks.evaluation.acceptance_length import NAME, count_own_token
from draftworks.evaluation.report.plots import COLOURS, label_axes, make_figure, render_png
from draftworks.training.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def render_training_plot(history: History, title: str, published_step: int | None = None) -> bytes:
    """Return `draw_training_figure` as PNG bytes."""
    return render_png(draw_training_figure(history, title, published_step))


def draw_training_figure(history: History, title: str, published_step: int | None = None) -> Figure:
    """Plot loss and simulated acceptance length over optimizer steps, on training and held-out data.

    The loss has no unit, since strategies define it differently (EAGLE-3 sums weighted draft steps). A vertical line
    marks a resume, a ring the evaluation of the published draft.
    """
    figure = make_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    _curves(
        left,
        [(point.step, point.loss) for point in history.train],
        [(point.step, point.result.avg_loss) for point in history.evals],
    )
    label_axes(left, title, "optimizer step", "loss (training objective)")
    _curves(
        right,
        [(point.step, count_own_token(point.simulated_acc_len)) for point in history.train],
        [(point.step, count_own_token(point.result.simulated_acc_len)) for point in history.evals],
    )
    right.set_ylim(bottom=count_own_token(0.0))
    for session in history.sessions[1:]:
        for axes in (left, right):
            axes.axvline(session.start_step, color="0.8", linewidth=0.8, zorder=0)
    published = None if published_step is None else history.find_evaluation(published_step)
    if published is not None:
        ring = {"marker": "o", "s": 90, "facecolors": "none", "edgecolors": COLOURS[1], "zorder": 3}
        left.scatter([published_step], [published.avg_loss], **ring)
        right.scatter([published_step], [count_own_token(published.simulated_acc_len)], **ring)
    label_axes(right, "", "optimizer step", f"{NAME}, simulated (rung 1)")
    return figure


def _curves(axes: Axes, train: list[tuple[int, float | None]], held_out: list[tuple[int, float | None]]) -> None:
    """Plot both curves; points without a value are left out."""
    looks = {"training": (train, COLOURS[0], ""), "held out": (held_out, COLOURS[1], "o")}
    for name, (points, colour, marker) in looks.items():
        known = [point for point in points if point[1] is not None]
        if known:
            steps, values = zip(*known)
            axes.plot(steps, values, color=colour, marker=marker, label=name)
    if axes.lines:
        axes.legend(frameon=False)
