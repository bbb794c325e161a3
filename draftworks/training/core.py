"""One micro-step after the other; an optimizer step where a window of them is complete."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.errors import TrainingError
from draftworks.evaluation.result import EvalResult, MetricAccumulator
from draftworks.features.contracts import TrainBatch
from draftworks.training.backend import TrainingBackend
from draftworks.training.optimizer import BF16Optimizer


@dataclass(frozen=True)
class StepResult:
    """An optimizer step: sums over its window and all ranks, the gradient's norm before clipping, the rate used."""

    totals: EvalResult
    grad_norm: float
    lr: float


class TrainerCore:
    """Accumulates gradients of *summed* losses over a window and normalises once, at its end.

    The loss of a window is sum(loss_sum) / sum(loss_weight) over its micro-steps on all ranks, so how the global batch
    is cut into micro-batches and ranks changes nothing but rounding. Where a window ends, its last batch says.
    """

    def __init__(self, strategy: DraftStrategy, backend: TrainingBackend, optimizer: BF16Optimizer) -> None:
        self.strategy = strategy
        self.backend = backend
        self.optimizer = optimizer
        self._window = MetricAccumulator()
        self._samples: list[str] = []

    def train_step(self, batch: TrainBatch, ctx: StepContext) -> StepResult | None:
        """Forward and backward of one micro-batch; the optimizer's step and its result at the end of a window.

        A batch without samples, of a rank that has fewer than others, is run for the sake of collectives and adds nothing.

        Raises:
            TrainingError: loss or gradient is not finite. Weights are those of the step before.
        """
        output = self.strategy.forward_loss(batch.to(self.backend.device), ctx)
        self.backend.backward(output.loss_sum, is_boundary=batch.ends_step)
        if batch.sample_ids:
            self._window.add(output, batch.num_tokens)
            self._samples += batch.sample_ids
        return self._optimizer_step(ctx) if batch.ends_step else None

    def _optimizer_step(self, ctx: StepContext) -> StepResult:
        totals = self._window.sum_over_ranks()
        self._require_finite(totals, ctx)
        if totals.loss_weight > 0:
            self.backend.scale_gradients(1.0 / totals.loss_weight)
            done = self.optimizer.step()
        else:
            # Without a supervised token there is no gradient, but AdamW's momentum would move the weights all the same.
            done = self.optimizer.skip()
        self._window = MetricAccumulator()
        self._samples = []
        return StepResult(totals, done.grad_norm, done.lr)

    def _require_finite(self, totals: EvalResult, ctx: StepContext) -> None:
        if not math.isfinite(totals.loss_sum):
            raise TrainingError(
                f"the loss of optimizer step {ctx.global_step} is {totals.loss_sum}. This rank's samples were "
                f"{', '.join(self._samples)}: check their features, lower lr, or use compute_dtype: float32"
            )
