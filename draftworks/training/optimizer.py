"""AdamW over fp32 masters, gradient clipping and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from draftworks.errors import TrainingError

Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class OptimizerStep:
    """What one step did: the gradient's norm before clipping, over all ranks, and the learning rate used."""

    grad_norm: float
    lr: float


class BF16Optimizer:
    """Clip, step, advance the schedule. The name is the reference's; FSDP2's sharded fp32 parameters are the masters.

    Args:
        parameters: this rank's fp32 shards (DTensors) or plain parameters.
        total_steps: optimizer steps of the whole training, for warm-up and decay.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        total_steps: int,
        schedule: Schedule = "cosine",
        warmup_ratio: float = 0.015,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.5,
    ) -> None:
        self._parameters = list(parameters)
        self._max_grad_norm = max_grad_norm
        self._peak = lr
        self._factor = lr_factor(schedule, total_steps, warmup_ratio)
        self._steps = 0
        self._adamw = torch.optim.AdamW(self._parameters, lr=self.lr, weight_decay=weight_decay, fused=True)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._peak * self._factor(self._steps)

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

    def _advance(self) -> None:
        self._adamw.zero_grad(set_to_none=True)
        self._steps += 1


def lr_factor(schedule: Schedule, total_steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """The learning rate of step s (from 0) as a share of the peak: linear warm-up, then the schedule, floor 0.

    Warm-up takes `int(warmup_ratio * total_steps)` steps, step s at (s + 1) / warmup, as in SpecForge.
    """
    warmup = int(warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0 - progress if schedule == "linear" else 1.0

    return factor
