"""Observers of a training: a progress line for people, event files for TensorBoard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftworks.errors import ConfigError
from draftworks.evaluation.acceptance_length import count_own_token
from draftworks.training.history import EvalPoint, TrainPoint
from draftworks.training.scalars import list_eval_scalars, list_train_scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
    """

    def __init__(self, sink: ProgressSink, measure: Callable[[int], Mapping[str, Any]] = lambda step: {}) -> None:
        self._sink = sink
        self._measure = measure

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
                "eta_s": round(estimate_remaining_s(point, total_steps)),
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


def estimate_remaining_s(point: TrainPoint, total_steps: int) -> float:
    """Return the seconds left at the mean speed so far, without evaluations."""
    return point.seconds / point.step * (total_steps - point.step)
