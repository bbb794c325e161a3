"""Schedule shapes, clipping, and steps that must not be made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from draftworks.errors import TrainingError
from draftworks.training.optimizer import BF16Optimizer, Schedule, lr_factor


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    factor = lr_factor("constant", total_steps=100, warmup_ratio=0.05)
    assert [factor(step) for step in range(7)] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]


def test_golden_schedules() -> None:
    cosine, linear = lr_factor("cosine", 10, 0.2), lr_factor("linear", 10, 0.2)
    assert [round(cosine(step), 4) for step in (0, 1, 2, 6, 10)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert [round(linear(step), 4) for step in (0, 1, 2, 6, 10)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert round(cosine(4), 4) == 0.8536
    assert round(linear(4), 4) == 0.75


@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(1, 500), st.floats(0, 0.9))
def test_schedule_stays_positive_and_never_rises_after_warm_up(schedule: Schedule, total: int, ratio: float) -> None:
    factor = lr_factor(schedule, total, ratio)
    values = [factor(step) for step in range(total)]
    after = values[int(ratio * total) :]
    assert all(0 < value <= 1 for value in values)
    assert all(later <= earlier for earlier, later in zip(after, after[1:]))
    assert factor(10 * total) == (1.0 if schedule == "constant" else 0.0)


def parameter_with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_step_reports_the_norm_before_clipping_and_the_rate_used() -> None:
    parameters = [parameter_with_gradient(3.0), parameter_with_gradient(4.0)]
    optimizer = BF16Optimizer(parameters, lr=0.1, total_steps=10, warmup_ratio=0.2, max_grad_norm=1.0)
    done = optimizer.step()
    assert done.grad_norm == pytest.approx(5.0)
    assert done.lr == pytest.approx(0.05)
    assert optimizer.lr == pytest.approx(0.1)
    assert parameters[0].grad is None


def test_clipping_keeps_the_direction() -> None:
    """Plain AdamW divides the scale out, so its first moment is looked at."""
    parameter = parameter_with_gradient(3.0, 4.0)
    optimizer = BF16Optimizer([parameter], lr=0.1, total_steps=10, max_grad_norm=0.5)
    optimizer.step()
    moment = optimizer._adamw.state[parameter]["exp_avg"] / 0.1
    torch.testing.assert_close(moment, torch.tensor([0.3, 0.4]), rtol=1e-4, atol=0)


def test_gradient_that_is_not_finite_is_refused_before_the_step() -> None:
    parameter = parameter_with_gradient(float("inf"), 1.0)
    optimizer = BF16Optimizer([parameter], lr=0.1, total_steps=10)
    with pytest.raises(TrainingError, match="optimizer step 0 has norm inf"):
        optimizer.step()
    assert torch.equal(parameter, torch.zeros(2))


def test_skipped_step_moves_the_schedule_and_not_the_weights() -> None:
    parameter = parameter_with_gradient(1.0, 1.0)
    optimizer = BF16Optimizer([parameter], lr=0.1, total_steps=10, warmup_ratio=0.2, weight_decay=0.5)
    assert optimizer.skip().lr == pytest.approx(0.05)
    assert optimizer.lr == pytest.approx(0.1)
    assert parameter.grad is None
    assert torch.equal(parameter, torch.zeros(2))
