"""The training loop over epochs and optimizer steps: when to record, save, evaluate and stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftworks.distributed.collectives import get_world_size, max_over_ranks
from draftworks.drafts.strategy import StepContext
from draftworks.errors import DataError
from draftworks.evaluation.evaluator import EvaluationStopped
from draftworks.evaluation.result import EvalResult
from draftworks.features.loader import TrainingLoader
from draftworks.training.history import EvalPoint, History, Session, StepListener, TrainingObserver, TrainPoint
from draftworks.training.optimizer import StepResult, TrainerCore
from draftworks.training.resume import Checkpointer, ResumeState, TrainingProgress


@dataclass(frozen=True)
class Plan:
    """Length and cadence of a training, in optimizer steps.

    Recorded are every `log_every`-th step, the first and the last, so that curves begin where training begins. With
    `patience` every evaluated step is recorded too, since it may be the last; where the data may end, every saved one
    as well. The last step is always saved and evaluated.

    Attributes:
        eval_every, save_every: 0 means at the end only.
        patience: training ends after so many evaluations in a row without a better one; 0 never ends it.
        evaluates_start: evaluate the initial weights too, since they may remain the best.
        may_end: whether the data may end before `total_steps`.
    """

    total_steps: int
    steps_per_epoch: int
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    patience: int = 0
    evaluates_start: bool = False
    may_end: bool = False

    def records(self, step: int) -> bool:
        may_be_last = (self.patience > 0 or self.may_end) and self.evaluates(step)
        may_be_last = may_be_last or (self.may_end and self.saves(step))
        return step in (1, self.total_steps) or step % self.log_every == 0 or may_be_last

    def evaluates(self, step: int) -> bool:
        if step == 0:
            return self.evaluates_start or self.total_steps == 0
        return step == self.total_steps or (self.eval_every > 0 and step % self.eval_every == 0)

    def saves(self, step: int) -> bool:
        return step == self.total_steps or (self.save_every > 0 and step % self.save_every == 0)


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the controller, on every rank.

    Attributes:
        evaluate: returns the held-out result of the current draft, or None; called at the same steps on every rank. May
            raise `EvaluationStopped`.
        stop_signal: returns the number of the signal that asks this rank to stop, or 0; polled after every step.
        steps: listener of this rank, if it has one.
        discards: whether this rank's data of a step were not real, asked before the step counts. None: they always are.
    """

    evaluate: Callable[[StepContext], EvalResult | None]
    stop_signal: Callable[[], int] = lambda: 0
    observers: Sequence[TrainingObserver] = field(default_factory=tuple)
    steps: StepListener | None = None
    discards: Callable[[int], bool] | None = None


class StepDiscarded(Exception):
    """Raised on all ranks if the data of a step were not real on one: the weights are of no use, and nothing is saved."""


class TrainerController:
    """Runs a `TrainerCore` through a plan.

    Attributes:
        stopped_by: the signal that ended `fit` early, after a checkpoint; 0 if none.
        ended_early: whether `patience` ended the training.
    """

    def __init__(
        self,
        core: TrainerCore,
        loader: TrainingLoader,
        plan: Plan,
        position: TrainingProgress,
        hooks: Hooks,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.position = position
        self.history = History(plan.total_steps)
        self.stopped_by = 0
        self.ended_early = False
        self._core = core
        self._loader = loader
        self._plan = plan
        self._hooks = hooks
        self._checkpointer = checkpointer
        self._clock = _StopWatch()
        self._window = EvalResult.empty()
        self._last: StepResult | None = None
        self._reported_checkpoint = 0

    @property
    def global_step(self) -> int:
        return self.position.global_step

    def restore(self, state: ResumeState) -> None:
        """Continue from a checkpoint."""
        self.position, self.history, self._window = state.position, state.history, state.window
        self._clock = _StopWatch(state.seconds)
        if self._checkpointer is not None and self._checkpointer.manager.folder.holds(state.folder, self.global_step):
            self._checkpointer.saved_step = self.global_step

    def fit(self) -> History:
        """Train until the end of the plan, of the data or of patience, or a signal. A collective.

        If the planned steps are done already, no training data is read. An evaluation that an interruption cut off is
        made first.

        Raises:
            DataError: a stream ended before its first global batch.
        """
        self.history.sessions.append(Session(self.global_step, get_world_size(), time.time()))
        if self._plan.evaluates(self.global_step) and self.history.find_evaluation(self.global_step) is None:
            self._run_evaluation()
        self.ended_early = self._has_stalled()
        while not self._is_over():
            self._run_epoch()
            if self._loader.has_ended and not self._is_over():
                self._end_stream()
        if self._checkpointer is not None:
            self._checkpointer.manager.wait()
        self._report_checkpoint()
        return self.history

    def _is_over(self) -> bool:
        return self.global_step >= self._plan.total_steps or self.ended_early or bool(self.stopped_by)

    def _context(self) -> StepContext:
        return StepContext(self.global_step, self._plan.total_steps, training=True)

    def _run_epoch(self) -> None:
        """Train the remaining steps of the current epoch."""
        self._loader.set_epoch(self.position.epoch)
        self._loader.seek(self.position.epoch_steps)
        self._clock.start()
        for batch in self._loader:
            result = self._core.train_step(batch, self._context())
            if result is None:
                continue
            self._require_real(self.global_step + 1)
            self.position = self.position.after_step()
            if self._hooks.steps is not None:
                self._hooks.steps.on_step(self.global_step)
            self._after_step(result)
            self._report_checkpoint()
            if self._is_over():
                break
        self._clock.stop()

    def _require_real(self, step: int) -> None:
        discards = self._hooks.discards
        if discards is not None and max_over_ranks(int(discards(step))):
            raise StepDiscarded(step)

    def _end_stream(self) -> None:
        """Make the last step of a stream that has ended the last of the plan: record, save and evaluate it."""
        self.stopped_by = self._loader.stopped_by
        if not self.stopped_by:
            if self.global_step == 0:
                raise DataError(
                    "the stream ended before its first optimizer step: expected at least one global batch of "
                    f"{self.position.global_batch_size} samples. Lower training.global_batch_size, or use more data"
                )
            self._plan = replace(self._plan, total_steps=self.global_step)
            recorded = self.history.train and self.history.train[-1].step == self.global_step
            if self._last is not None and not recorded:
                self._record(self._last)
        if self.global_step > 0:
            self._save()
        if not self.stopped_by and self.history.find_evaluation(self.global_step) is None:
            self._run_evaluation()

    def _after_step(self, result: StepResult) -> None:
        self._last = result
        self._window = self._window + result.totals
        if self._plan.records(self.global_step):
            self._record(result)
        self._clock.stop()
        # Saved before the evaluation, which is long; a resume from here makes it up.
        if self._plan.saves(self.global_step):
            self._save()
        if self._plan.evaluates(self.global_step):
            self._run_evaluation()
        self._stop_if_asked()
        self._clock.start()

    def _stop_if_asked(self) -> None:
        self.stopped_by = self.stopped_by or max_over_ranks(self._hooks.stop_signal())
        if self.stopped_by or self.ended_early:
            self._save()

    def _save(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.save(self.position, self.history, self._window, self._clock.seconds())

    def _report_checkpoint(self) -> None:
        """Tell the listener about a checkpoint that is complete since the last call."""
        complete = 0 if self._checkpointer is None else self._checkpointer.manager.complete_step
        if complete > self._reported_checkpoint and self._hooks.steps is not None:
            self._reported_checkpoint = complete
            self._hooks.steps.on_checkpoint(complete)

    def _record(self, last: StepResult) -> None:
        totals, seconds = self._window, self._clock.seconds()
        point = TrainPoint(
            step=self.global_step,
            epoch=self.global_step / self._plan.steps_per_epoch,
            loss=totals.avg_loss if totals.supervised_tokens else None,
            accuracy=totals.avg_acc,
            simulated_acc_len=totals.simulated_acc_len,
            lr=last.lr,
            grad_norm=last.grad_norm,
            tokens=totals.tokens,
            tokens_per_s=totals.tokens / max(seconds - self.history.seconds, 1e-9),
            seconds=seconds,
        )
        self.history.train.append(point)
        self._window = EvalResult.empty()
        for observer in self._hooks.observers:
            observer.on_train(point, self._plan.total_steps)

    def _run_evaluation(self) -> None:
        """Evaluate, record the best, and end the training if patience is exhausted.

        A best that is not due for saving is saved first, without this evaluation in its history: a resume from it
        evaluates again, and so finds the best again if this process dies before recording it. A signal ends an
        evaluation between two batches.
        """
        try:
            result = self._hooks.evaluate(self._context())
        except EvaluationStopped as stopped:
            self.stopped_by = stopped.signum
            self._save()
            return
        metrics = {} if result is None else result.metrics()
        if self._checkpointer is not None and self._checkpointer.manager.is_better(metrics):
            self._save()
            self._checkpointer.manager.update_best(self.global_step, metrics)
        if result is None:
            return
        point = EvalPoint(self.global_step, self._clock.seconds(), result)
        self.history.evals.append(point)
        self.ended_early = self._has_stalled()
        for observer in self._hooks.observers:
            observer.on_eval(point)

    def _has_stalled(self) -> bool:
        """Whether `patience` evaluations in a row brought no better one."""
        best = None if self._checkpointer is None else self._checkpointer.manager.best
        if best is None or not self._plan.patience:
            return False
        return sum(point.step > best.step for point in self.history.evals) >= self._plan.patience


class _StopWatch:
    """Stop watch: seconds between start and stop, summed."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._before = self.seconds()
        self._since = None

    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)
