"""Pictures as PNG bytes, without a display. Colours are Okabe and Ito's, which colour-blind people can tell apart."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from draftworks.evaluation.result import EvalResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "^", "D", "v", "P")


def acceptance_plot(drafts: Mapping[str, EvalResult], title: str) -> bytes:
    """Teacher-forced accuracy at each draft position, one line per draft."""
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    for index, (name, result) in enumerate(drafts.items()):
        accuracies = result.per_position_acc
        axes.plot(
            range(1, len(accuracies) + 1),
            [100 * accuracy for accuracy in accuracies],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            label=f"{name} (length {result.simulated_acc_len:.2f})",
        )
    axes.set_xticks(range(1, 1 + max((len(result.correct) for result in drafts.values()), default=0)))
    axes.set_ylim(bottom=0)
    label(axes, title, "draft position", "equal to the target's argmax (%)")
    axes.legend(title="draft, simulated_acc_len (rung 1)", frameon=False)
    return as_png(figure)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, axis labels with units, a quiet grid."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def as_png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
