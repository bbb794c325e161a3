"""The loop over epochs and steps: when to record, when to evaluate, when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftworks.drafts.strategy import StepContext
from draftworks.evaluation.result import EvalResult
from draftworks.features.loader import FeatureDataLoader
from draftworks.training.core import StepResult, TrainerCore
from draftworks.training.history import EvalPoint, History, TrainPoint
from draftworks.training.observers import TrainingObserver


@dataclass(frozen=True)
class Plan:
    """How long to train, and how often to look. Steps are optimizer steps; `eval_every` 0 evaluates at the end only.

    Beside every `log_every`-th step, the first and the last are recorded: a curve begins where training begins.
    """

    total_steps: int
    steps_per_epoch: int
    log_every: int = 10
    eval_every: int = 0


class TrainerController:
    """Drives a `TrainerCore` through a plan.

    Args:
        evaluate: the held-out result of the draft as it is, or None; called on every rank at the same steps.
    """

    def __init__(
        self,
        core: TrainerCore,
        loader: FeatureDataLoader,
        plan: Plan,
        evaluate: Callable[[StepContext], EvalResult | None],
        observers: Sequence[TrainingObserver] = (),
    ) -> None:
        self.global_step = 0
        self.history = History(plan.total_steps)
        self._core = core
        self._loader = loader
        self._plan = plan
        self._evaluate = evaluate
        self._observers = observers
        self._clock = _StopWatch()
        self._totals = EvalResult.nothing()

    def fit(self) -> History:
        """Train until `total_steps`, evaluate at the end; returns at once if that many steps are done already."""
        if self.global_step >= self._plan.total_steps:
            return self.history
        while self.global_step < self._plan.total_steps:
            self._epoch()
        if not self.history.evals or self.history.evals[-1].step != self.global_step:
            self._evaluation()
        return self.history

    def _context(self) -> StepContext:
        return StepContext(self.global_step, self._plan.total_steps)

    def _epoch(self) -> None:
        """Train the rest of the epoch that `global_step` is in."""
        epoch, done = divmod(self.global_step, self._plan.steps_per_epoch)
        self._loader.set_epoch(epoch)
        self._loader.seek(done * self._core.accumulation_steps)
        self._clock.start()
        for batch in self._loader:
            result = self._core.train_step(batch, self._context())
            if result is None:
                continue
            self.global_step += 1
            self._after_step(result)
            if self.global_step == self._plan.total_steps:
                break
        self._clock.stop()

    def _after_step(self, result: StepResult) -> None:
        self._totals = self._totals + result.totals
        is_end = self.global_step in (1, self._plan.total_steps)
        if is_end or self.global_step % self._plan.log_every == 0:
            self._record(result)
        if self._plan.eval_every and self.global_step % self._plan.eval_every == 0:
            self._clock.stop()
            self._evaluation()
            self._clock.start()

    def _record(self, last: StepResult) -> None:
        totals, seconds = self._totals, self._clock.seconds()
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
        self._totals = EvalResult.nothing()
        for observer in self._observers:
            observer.on_train(point, self._plan.total_steps)

    def _evaluation(self) -> None:
        result = self._evaluate(self._context())
        if result is None:
            return
        point = EvalPoint(self.global_step, self._clock.seconds(), result)
        self.history.evals.append(point)
        for observer in self._observers:
            observer.on_eval(point)


class _StopWatch:
    """Seconds while it runs."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._before = self.seconds()
        self._since = None

    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)
