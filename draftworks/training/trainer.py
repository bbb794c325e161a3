"""`Trainer`: a strategy, its data and hyper-parameters, put together and trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.result import EvalResult
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.schedule import TrainSchedule
from draftworks.specs import TrainingSpec
from draftworks.training.backend import FSDPTrainingBackend
from draftworks.training.controller import Plan, TrainerController
from draftworks.training.core import TrainerCore
from draftworks.training.history import History
from draftworks.training.observers import TrainingObserver
from draftworks.training.optimizer import BF16Optimizer


class Trainer:
    """Composes loader, backend, optimizer, core and controller. Every rank of the process group builds one.

    Args:
        strategy: with its initial weights loaded; its model is wrapped in place.
        train_loader: from `FeatureDataLoader.for_training`, whose schedule says what an optimizer step is.
        eval_loader: from `FeatureDataLoader.for_evaluation`.
        device: where this rank computes.
    """

    def __init__(
        self,
        strategy: DraftStrategy,
        train_loader: FeatureDataLoader,
        eval_loader: FeatureDataLoader,
        training: TrainingSpec,
        device: torch.device,
        observers: Sequence[TrainingObserver] = (),
    ) -> None:
        schedule = train_loader.schedule
        if not isinstance(schedule, TrainSchedule):
            raise TypeError(f"train_loader needs a TrainSchedule, found a {type(schedule).__name__}")
        plan = plan_of(training, schedule.steps)
        self.strategy = strategy
        self.backend = FSDPTrainingBackend(device, getattr(torch, training.compute_dtype))
        self.backend.prepare_model(strategy)
        optimizer = BF16Optimizer(
            self.backend.parameters(),
            lr=training.lr,
            total_steps=plan.total_steps,
            schedule=training.schedule,
            warmup_ratio=training.warmup_ratio,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
        )
        self.core = TrainerCore(strategy, self.backend, optimizer, schedule.accumulation)
        self.controller = TrainerController(self.core, train_loader, plan, self._evaluate, observers)
        self._eval_loader = eval_loader
        self._evaluator = Evaluator(device)

    def can_evaluate(self) -> bool:
        """Whether the held-out set has anything to measure a draft on: better known before training. A collective.

        Batch by batch, so that normally one forward is the price.
        """
        return any(self._evaluator.run(self.strategy, [batch]) is not None for batch in self._eval_loader)

    def fit(self) -> History:
        """Train to the end and evaluate. A collective."""
        return self.controller.fit()

    def weights(self) -> dict[str, Tensor]:
        """The whole draft's state on the CPU of rank 0; empty on the others. A collective."""
        return self.backend.full_state_dict()

    def _evaluate(self, ctx: StepContext) -> EvalResult | None:
        return self._evaluator.run(self.strategy, self._eval_loader, ctx)


def plan_of(training: TrainingSpec, steps_per_epoch: int) -> Plan:
    """Steps as configured: `epochs` of the data, at least one step, at most `max_steps`."""
    steps = max(1, round(training.epochs * steps_per_epoch))
    total = steps if training.max_steps is None else min(steps, training.max_steps)
    return Plan(total, steps_per_epoch, training.log_every, training.eval_every)
