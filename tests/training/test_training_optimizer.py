"""Clipping, and steps that must not be made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftworks.errors import TrainingError
from draftworks.training.optimizer import BF16Optimizer, LrSchedule


def parameter_with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def named(*parameters: nn.Parameter) -> dict[str, nn.Parameter]:
    return {f"p{index}": parameter for index, parameter in enumerate(parameters)}


def test_step_reports_the_norm_before_clipping_and_the_rate_used() -> None:
    parameters = [parameter_with_gradient(3.0), parameter_with_gradient(4.0)]
    optimizer = BF16Optimizer(named(*parameters), LrSchedule(0.1, 10, warmup_ratio=0.2), max_grad_norm=1.0)
    done = optimizer.step()
    assert done.grad_norm == pytest.approx(5.0)
    assert done.lr == pytest.approx(0.05)
    assert optimizer.lr == pytest.approx(0.1)
    assert parameters[0].grad is None


def test_clipping_keeps_the_direction() -> None:
    """Plain AdamW divides the scale out, so its first moment is looked at."""
    parameter = parameter_with_gradient(3.0, 4.0)
    optimizer = BF16Optimizer(named(parameter), LrSchedule(0.1, 10), max_grad_norm=0.5)
    optimizer.step()
    moment = optimizer.moments()["p0.exp_avg"] / 0.1
    torch.testing.assert_close(moment, torch.tensor([0.3, 0.4]), rtol=1e-4, atol=0)


def test_weights_are_bit_for_bit_those_of_torchs_adamw() -> None:
    """With weight decay, another rate at each step, and a parameter that has a gradient at every other step only."""
    generator = torch.Generator().manual_seed(3)
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, n)) for n in (7, 4)] for _ in range(2))
    schedule = LrSchedule(0.1, 6)
    optimizer = BF16Optimizer(named(*ours), schedule, weight_decay=0.3, max_grad_norm=1e9)
    reference = torch.optim.AdamW(theirs, weight_decay=0.3, fused=True)
    for step in range(6):
        for mine, other in zip(ours[: 2 - step % 2], theirs, strict=False):
            other.grad = torch.randn(mine.shape, generator=generator)
            mine.grad = other.grad.clone()
        reference.param_groups[0]["lr"] = schedule.lr(step)
        reference.step()
        reference.zero_grad()
        optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert optimizer.counters().updates == {"p0": 6, "p1": 3}


def test_gradient_that_is_not_finite_is_refused_before_the_step() -> None:
    parameter = parameter_with_gradient(float("inf"), 1.0)
    optimizer = BF16Optimizer(named(parameter), LrSchedule(0.1, 10))
    with pytest.raises(TrainingError, match="optimizer step 0 has norm inf"):
        optimizer.step()
    assert torch.equal(parameter, torch.zeros(2))


def test_skipped_step_moves_the_schedule_and_not_the_weights() -> None:
    parameter = parameter_with_gradient(1.0, 1.0)
    optimizer = BF16Optimizer(named(parameter), LrSchedule(0.1, 10, warmup_ratio=0.2), weight_decay=0.5)
    assert optimizer.skip().lr == pytest.approx(0.05)
    assert optimizer.lr == pytest.approx(0.1)
    assert parameter.grad is None
    assert torch.equal(parameter, torch.zeros(2))
