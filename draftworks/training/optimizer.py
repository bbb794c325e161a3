"""AdamW over fp32 masters, gradient clipping and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draftworks.errors import TrainingError
from draftworks.training.schedules import LrSchedule

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerStep:
    """What one step did: the gradient's norm before clipping, over all ranks, and the learning rate used."""

    grad_norm: float
    lr: float


@dataclass(frozen=True)
class OptimizerCounters:
    """`steps` moves the schedule; `updates` counts AdamW's own steps by parameter, for its bias correction. They differ
    by the steps without a supervised token, and a parameter that never had a gradient has no updates.
    """

    steps: int = 0
    updates: dict[str, int] = field(default_factory=dict)


class BF16Optimizer:
    """Clip, step, advance the schedule. The name is the reference's; FSDP2's sharded fp32 parameters are the masters.

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
        self._adamw = torch.optim.AdamW(self._parameters, lr=self.lr, weight_decay=weight_decay, fused=True)

    @property
    def names(self) -> list[str]:
        return list(self._named)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._schedule.lr(self._steps)

    def grad_norm(self) -> float:
        """Euclidean norm of the whole gradient, over all shards. A collective."""
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> OptimizerStep:
        """Clip the gradients to `max_grad_norm`, update, clear them, advance the schedule. A collective.

        Raises:
            TrainingError: the gradient is not finite; weights are as they were.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient of optimizer step {self._steps} has norm {norm}. Lower lr or max_grad_norm, use "
                "compute_dtype: float32, or look at the features for values that are not finite"
            )
        clip_grads_with_norm_(self._parameters, self._max_grad_norm, torch.tensor(norm))
        done = OptimizerStep(norm, self.lr)
        for group in self._adamw.param_groups:
            group["lr"] = done.lr
        self._adamw.step()
        self._advance()
        return done

    def skip(self) -> OptimizerStep:
        """Clear the gradients and advance the schedule, leaving weights and moments alone."""
        done = OptimizerStep(0.0, self.lr)
        self._advance()
        return done

    def counters(self) -> OptimizerCounters:
        known = {name: self._adamw.state.get(p, {}) for name, p in self._named.items()}
        return OptimizerCounters(self._steps, {name: int(state["step"]) for name, state in known.items() if state})

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments by `{parameter}.{moment}`, sharded as their parameters are; not copies."""
        known = {name: self._adamw.state.get(p, {}) for name, p in self._named.items()}
        return {f"{name}.{moment}": state[moment] for name, state in known.items() if state for moment in MOMENTS}

    def restore(self, counters: OptimizerCounters) -> dict[str, Tensor]:
        """Go on after so many steps. Returns moments of zeros, to be filled in place; see `moments`."""
        self._steps = counters.steps
        for name, updates in counters.updates.items():
            parameter = self._named[name]
            step = torch.tensor(float(updates), device=parameter.device)  # where fused AdamW keeps it
            self._adamw.state[parameter] = {"step": step, **{m: torch.zeros_like(parameter) for m in MOMENTS}}
        return self.moments()

    def _advance(self) -> None:
        self._adamw.zero_grad(set_to_none=True)
        self._steps += 1
