"""The history of a training as plain numbers: observed, plotted, reported, and written to history.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.acceptance_length import NAME, count_own_token
from draftworks.evaluation.report.plots import COLOURS, label_axes, make_figure, render_png
from draftworks.evaluation.result import EvalResult
from draftworks.storage.files import publish_json, read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


SCHEMA_VERSION = 2


@dataclass(frozen=True)
class TrainPoint:
    """Means and sums over consecutive optimizer steps that end with number `step`, counted from 1.

    Attributes:
        epoch: data seen so far, in epochs.
        loss: of these steps, as the strategy weighs it; None if nothing was supervised.
        accuracy, simulated_acc_len: rungs 0 (first position) and 1 of the acceptance ladder, on training data.
        lr, grad_norm: of the last step; the norm is before clipping.
        tokens: all tokens of these steps over all ranks, without padding.
        tokens_per_s: of training alone, without evaluations.
        seconds: of training alone, since its start.
    """

    step: int
    epoch: float
    loss: float | None
    accuracy: float
    simulated_acc_len: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    seconds: float


@dataclass(frozen=True)
class EvalPoint:
    """The held-out result after optimizer step `step`."""

    step: int
    seconds: float
    result: EvalResult


@dataclass(frozen=True)
class Session:
    """One process group's part of a training, which began or resumed after `start_step` steps."""

    start_step: int
    world_size: int
    started: float
    """Unix time, in seconds."""


@dataclass
class History:
    """What `Trainer.fit` returns. `total_steps` were planned, `steps` were done."""

    total_steps: int
    train: list[TrainPoint] = field(default_factory=list)
    evals: list[EvalPoint] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.train[-1].step if self.train else 0

    @property
    def tokens(self) -> int:
        return sum(point.tokens for point in self.train)

    @property
    def seconds(self) -> float:
        return self.train[-1].seconds if self.train else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def find_evaluation(self, step: int) -> EvalResult | None:
        """Return the held-out result after this step, None if there is none."""
        return next((point.result for point in self.evals if point.step == step), None)

    def first_loss(self, share: float = 0.1) -> float | None:
        """Return the mean loss of the first `share` of the recorded points, at least one, or None.

        None if nothing was supervised. After one step, the first loss is also the last.
        """
        return _mean(self._losses()[: self._count(share)])

    def last_loss(self, share: float = 0.1) -> float | None:
        """Return the mean loss of the last `share` of the recorded points, at least one, or None."""
        return _mean(self._losses()[-self._count(share) :])

    def _losses(self) -> list[float]:
        return [point.loss for point in self.train if point.loss is not None]

    def _count(self, share: float) -> int:
        return max(1, round(share * len(self._losses())))

    def to_json(self) -> dict[str, Any]:
        """Return all values; each evaluation includes its metrics, for readers that do not compute ratios."""
        evals = [
            {"step": e.step, "seconds": e.seconds, "result": e.result.to_json(), "metrics": e.result.metrics()}
            for e in self.evals
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "total_steps": self.total_steps,
            "train": [asdict(point) for point in self.train],
            "evals": evals,
            "sessions": [asdict(session) for session in self.sessions],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> History:
        return cls(
            total_steps=values["total_steps"],
            train=[TrainPoint(**point) for point in values["train"]],
            evals=[EvalPoint(e["step"], e["seconds"], EvalResult.from_json(e["result"])) for e in values["evals"]],
            sessions=[Session(**session) for session in values["sessions"]],
        )

    def save(self, path: Path) -> None:
        publish_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` wrote.

        Raises:
            StoreError: missing, damaged, or of another schema.
        """
        try:
            values = read_json(path)
            if values["schema_version"] != SCHEMA_VERSION:
                raise StoreError(f"{path}: schema {values['schema_version']}, expected {SCHEMA_VERSION}")
            return cls.from_json(values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a training history ({error!r}). Train the draft again") from error


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


TRAIN_SCALARS = ("loss", "accuracy", "simulated_acc_len", "lr", "grad_norm", "tokens_per_s")


def list_train_scalars(point: TrainPoint) -> dict[str, float]:
    """Return the figures of a training point; one without a value is absent."""
    values = {f"train/{name}": getattr(point, name) for name in TRAIN_SCALARS}
    return {name: value for name, value in values.items() if value is not None}


def list_eval_scalars(point: EvalPoint) -> dict[str, float]:
    """Return the metrics of an evaluation; of a list each item, under its index."""
    found: dict[str, float] = {}
    for name, value in point.result.metrics().items():
        if isinstance(value, list):
            found.update({f"{name}/{index}": item for index, item in enumerate(value)})
        else:
            found[name] = value
    return found


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


class TrainingObserver(Protocol):
    """Called on every rank after each recorded point. Values are over all ranks; only the clocks are the rank's own."""

    def on_train(self, point: TrainPoint, total_steps: int) -> None: ...

    def on_eval(self, point: EvalPoint) -> None: ...


class StepListener(Protocol):
    """Called on the rank that has one, at every optimizer step: the other half of a stream of features."""

    def on_step(self, global_step: int) -> None:
        """Called after the step, before it is saved."""

    def on_checkpoint(self, global_step: int) -> None:
        """Called when a complete checkpoint covers the step, perhaps some steps later."""


class ProgressSink(Protocol):
    """Shows short named values; may drop some that follow each other fast, but none with `force`."""

    def __call__(self, values: Mapping[str, Any], *, force: bool = False) -> None: ...


class ProgressReport:
    """Passes each point to a `ProgressSink`. Evaluations and the last step are never dropped.

    Args:
        measure: more figures of a training point, by name; called with its step.
        find_share_done: see `DraftStrategy`.
    """

    def __init__(
        self,
        sink: ProgressSink,
        measure: Callable[[int], Mapping[str, Any]] = lambda step: {},
        find_share_done: Callable[[int, int], float] = lambda step, total_steps: step / total_steps,
    ) -> None:
        self._sink = sink
        self._measure = measure
        self._find_share_done = find_share_done

    def on_train(self, point: TrainPoint, total_steps: int) -> None:
        self._sink(
            {
                "step": f"{point.step}/{total_steps}",
                "epoch": round(point.epoch, 2),
                "loss": "none" if point.loss is None else point.loss,
                "acceptance_length_rung1": count_own_token(point.simulated_acc_len),
                "lr": point.lr,
                "grad_norm": point.grad_norm,
                "tokens/s": round(point.tokens_per_s),
                "eta_s": round(estimate_remaining_s(point, self._find_share_done(point.step, total_steps))),
                **self._measure(point.step),
            },
            force=point.step == total_steps,
        )

    def on_eval(self, point: EvalPoint) -> None:
        result = point.result
        values: dict[str, Any] = {
            "step": point.step,
            "heldout_acceptance_length_rung1": count_own_token(result.simulated_acc_len),
        }
        if result.avg_loss is not None:
            values["heldout_loss"] = result.avg_loss
        self._sink({**values, "heldout_acc": result.avg_acc}, force=True)


class TensorBoardLog:
    """Scalars for TensorBoard, written into `folder`.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "training.tensorboard is on, but TensorBoard is not installed: "
                "pip install -e '.[tensorboard]', or turn it off"
            ) from error
        self._open = functools.partial(SummaryWriter, str(folder))
        self._writer: SummaryWriter | None = None

    def _writer_from(self, step: int) -> SummaryWriter:
        """Open the writer at `step`; events of an interrupted training from there on are dropped: it trains them again."""
        if self._writer is None:
            self._writer = self._open(purge_step=step)
        return self._writer

    def on_train(self, point: TrainPoint, total_steps: int) -> None:
        self._write(point.step, list_train_scalars(point))

    def on_eval(self, point: EvalPoint) -> None:
        self._write(point.step, list_eval_scalars(point))

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._writer_from(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()


def estimate_remaining_s(point: TrainPoint, share_done: float) -> float:
    """Return the seconds left at the mean speed so far, without evaluations.

    Args:
        share_done: of the training's work, above 0.
    """
    return point.seconds * (1 - share_done) / share_done
