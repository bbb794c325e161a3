"""The optimizer step: AdamW over fp32 masters, clipping, learning-rate schedule, and the core that accumulates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adamw import adamw

from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.errors import TrainingError
from draftworks.evaluation.result import EvalResult, MetricAccumulator
from draftworks.features.contracts import TrainBatch
from draftworks.training.backend import TrainingBackend

ScheduleName = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True)
class LrSchedule:
    """Learning-rate schedule: linear warm-up to the peak, then one of three courses.

    constant: the peak. cosine, linear: from the peak to the floor at the last step. wsd (warm-up, stable, decay): the
    peak, then linearly to the floor over the last `decay_ratio` of all steps (MiniCPM, arXiv 2404.06395; linear decay
    as in arXiv 2405.18392).

    Warm-up takes `int(warmup_ratio * total_steps)` steps, step s at (s + 1) / warmup, as in SpecForge.

    Attributes:
        peak: the highest learning rate.
        floor: the lowest after warm-up, as a share of the peak.
    """

    peak: float
    total_steps: int
    name: ScheduleName = "cosine"
    warmup_ratio: float = 0.015
    decay_ratio: float = 0.2
    floor: float = 0.0

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        return self.peak * self._share(step)

    def _share(self, step: int) -> float:
        warmup = int(self.warmup_ratio * self.total_steps)
        if step < warmup:
            return (step + 1) / warmup
        return self.floor + (1.0 - self.floor) * self._decayed(step, warmup)

    def _decayed(self, step: int, warmup: int) -> float:
        """Return a factor from 1 to 0 between the end of the warm-up and the last step."""
        begin = max(warmup, self.total_steps - max(1, int(self.decay_ratio * self.total_steps)))
        if self.name == "constant" or (self.name == "wsd" and step < begin):
            return 1.0
        start = begin if self.name == "wsd" else warmup
        progress = min(1.0, (step - start) / max(1, self.total_steps - start))
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.name == "cosine" else 1.0 - progress


STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""torch's defaults of AdamW."""


@dataclass(frozen=True)
class OptimizerStep:
    """Result of one step: the gradient norm over all ranks before clipping, and the learning rate used."""

    grad_norm: float
    lr: float


@dataclass(frozen=True)
class OptimizerCounters:
    """Counters of the schedule (`steps`) and of AdamW per parameter (`updates`, for its bias correction).

    They differ by steps without a supervised token, and a parameter that never had a gradient has no updates.
    """

    steps: int = 0
    updates: dict[str, int] = field(default_factory=dict)


class BF16Optimizer:
    """AdamW with clipping and a schedule. Named as in SpecForge; its masters are the backend's fp32 parameters.

    The update is torch's functional AdamW. Its class would import torch._dynamo, a second or more of each start.

    Args:
        parameters: this rank's fp32 shards (DTensors) or plain parameters, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        schedule: LrSchedule,
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.5,
    ) -> None:
        self._named = dict(parameters)
        self._parameters = list(self._named.values())
        self._max_grad_norm = max_grad_norm
        self._schedule = schedule
        self._steps = 0
        self._weight_decay = weight_decay
        self._state: dict[str, dict[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._named)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._schedule.lr(self._steps)

    def grad_norm(self) -> float:
        """Return the Euclidean norm of the whole gradient, over all shards. A collective."""
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        whole = getattr(norm, "full_tensor", None)  # that of DTensors, whose module one rank does not import
        return float(norm if whole is None else whole())

    def step(self) -> OptimizerStep:
        """Clip the gradients to `max_grad_norm`, update, clear them, advance the schedule. A collective.

        Raises:
            TrainingError: the gradient is not finite; weights are unchanged.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient of optimizer step {self._steps} has norm {norm}. Lower lr or max_grad_norm, use "
                "compute_dtype: float32, or look at the features for values that are not finite"
            )
        clip_grads_with_norm_(self._parameters, self._max_grad_norm, torch.tensor(norm))
        done = OptimizerStep(norm, self.lr)
        self._update(done.lr)
        self._advance()
        return done

    def skip(self) -> OptimizerStep:
        """Clear the gradients and advance the schedule without changing weights or moments."""
        done = OptimizerStep(0.0, self.lr)
        self._advance()
        return done

    def counters(self) -> OptimizerCounters:
        return OptimizerCounters(self._steps, {name: int(state[STEP]) for name, state in self._state.items()})

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW's moments by `{parameter}.{moment}`, sharded like their parameters; not copies."""
        return {f"{name}.{moment}": state[moment] for name, state in self._state.items() for moment in MOMENTS}

    def restore(self, counters: OptimizerCounters) -> dict[str, Tensor]:
        """Set the counters and return zeroed moments, to be filled in place; see `moments`."""
        self._steps = counters.steps
        for name, updates in counters.updates.items():
            self._state[name] = _make_state(self._named[name], updates)
        return self.moments()

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """Update the parameters that have a gradient."""
        named = {name: parameter for name, parameter in self._named.items() if parameter.grad is not None}
        for name, parameter in named.items():
            if name not in self._state:
                self._state[name] = _make_state(parameter, 0)
        states = [self._state[name] for name in named]
        adamw(
            list(named.values()),
            [parameter.grad for parameter in named.values() if parameter.grad is not None],
            [state[MOMENTS[0]] for state in states],
            [state[MOMENTS[1]] for state in states],
            [],
            [state[STEP] for state in states],
            fused=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=lr,
            weight_decay=self._weight_decay,
            eps=EPSILON,
            maximize=False,
        )

    def _advance(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._steps += 1


def _make_state(parameter: nn.Parameter, updates: int) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter after so many updates, with zeroed moments."""
    step = torch.tensor(float(updates), device=parameter.device)  # on the device, as fused AdamW keeps it
    return {STEP: step, **{moment: torch.zeros_like(parameter) for moment in MOMENTS}}


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step: sums over its window and all ranks, gradient norm before clipping, learning rate."""

    totals: EvalResult
    grad_norm: float
    lr: float


class TrainerCore:
    """Accumulates gradients of *summed* losses over a window of micro-steps, and normalises once at its end.

    The loss of a window is sum(loss_sum) / sum(loss_weight) over its micro-steps on all ranks, so how the global batch
    is split into micro-batches and ranks changes rounding only. The last batch of a window has `ends_step`.
    """

    def __init__(self, strategy: DraftStrategy, backend: TrainingBackend, optimizer: BF16Optimizer) -> None:
        self.strategy = strategy
        self.backend = backend
        self.optimizer = optimizer
        self._window = MetricAccumulator()
        self._samples: list[str] = []

    def train_step(self, batch: TrainBatch, ctx: StepContext) -> StepResult | None:
        """Run forward and backward of one micro-batch; at the end of a window step the optimizer and return the result.

        A batch without samples, on a rank that has fewer than others, takes part in collectives and adds nothing.

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
            # Without a supervised token the gradient is zero, but AdamW's momentum would still move the weights.
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
