"""Temperatures at which a draft is compared with its target: that of the loss, and those that servers sample at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from draftworks.config.teacher_options import TeacherOptions
from draftworks.drafts.strategy import StepContext

R = TypeVar("R")


@dataclass(frozen=True)
class Temperatures:
    """Temperatures above 0.

    Attributes:
        teacher: T of the loss. With z and y the logits of draft and target, p = softmax(z / T) and q = softmax(y / T) are
            compared, and the loss is multiplied by T². For the cross-entropy the gradient is T·(p - q) then, whose size
            hardly depends on T (Hinton, Vinyals & Dean 2015, arXiv 1503.02531, section 2.1).
        judged: of the acceptance probabilities Σ_v min(q_v, p_v) of an evaluation; 1 comes first. Empty in training,
            where they are those of the loss.
    """

    teacher: float = 1.0
    judged: tuple[float, ...] = ()

    @classmethod
    def choose(cls, options: TeacherOptions, ctx: StepContext) -> Temperatures:
        """Return those of a forward pass under these options."""
        return cls(options.teacher_temperature, () if ctx.training else (1.0, *ctx.temperatures))

    @property
    def loss_factor(self) -> float:
        """T²."""
        return self.teacher**2

    def judge(self, trained: R, measure: Callable[[float], R]) -> list[R]:
        """Return a measurement for each of `judged`: `trained` at T itself, else `measure(temperature)`, without gradients."""
        with torch.no_grad():
            return [trained if each == self.teacher else measure(each) for each in self.judged]


def soften(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature; at 1 the tensor itself, without a pass over it."""
    return logits if temperature == 1 else logits / temperature


def name_sampled_sums(ctx: StepContext, sums: Tensor | None, denoms: Tensor) -> dict[str, Tensor]:
    """Return the metric sums of an evaluation's `temperatures`.

    Args:
        sums: (1 + m, T), Σ of the acceptance probabilities at temperature 1 and at each of the m; None in training.
        denoms: (T,), number of labels.
    """
    if sums is None:
        return {}
    return {
        f"{name_rate(temperature)}_{part}": values
        for temperature, each in zip(ctx.temperatures, sums[1:], strict=True)
        for part, values in (("sums", each), ("denoms", denoms))
    }


RATE_PREFIX = "sampled_acceptance_t"


def name_rate(temperature: float) -> str:
    """Return the name of the acceptance probabilities at a temperature: `sampled_acceptance_t0.7`."""
    return f"{RATE_PREFIX}{temperature:g}"
