"""Every strategy on a device, by every back end of its attention, is what it is on a CPU with its masks written out."""

from __future__ import annotations

import functools
import math
from itertools import product

import pytest
import torch
from coverings import gate_or_long
from gpu_cases import engine_strategies
from gpu_equivalence import Step, cosine, small_step
from gpu_toys import assert_near, back_ends

FP32 = {"loss": 1e-5, "gradient": 1e-3, "other_proposals": 0.01}
"""Relative; of the norm of each gradient; share of proposals, which near ties decide."""
BF16 = {"loss": 0.02, "cosine": 0.99, "other_proposals": 0.2}
CASES = [(name, attention) for name in engine_strategies() for attention in back_ends(name)]
LAYOUTS = ["padded", "packed"]


@functools.cache
def reference(name: str) -> Step:
    return small_step(name, torch.device("cpu"), "float32", "padded", "eager", sharded=False)


def other_proposals(found: Step, expected: Step) -> float:
    return float((found.proposals != expected.proposals).double().mean())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_loss_gradients_and_proposals_are_those_of_the_cpu(name, attention, layout, device):
    if (attention, device.type) == ("flex", "cpu"):
        pytest.skip("torch's flex attention has no gradients on a CPU")
    found, expected = small_step(name, device, "float32", layout, attention, sharded=False), reference(name)
    assert found.loss == pytest.approx(expected.loss, rel=FP32["loss"])
    assert_near(found.gradients, expected.gradients, FP32["gradient"])
    assert other_proposals(found, expected) <= FP32["other_proposals"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("name", "layout", "sharded"),
    # On a GPU all are asked; without one, each strategy in one layout.
    gate_or_long(product(engine_strategies(), LAYOUTS, [True, False]), lambda case: case[1:] == ("packed", True)),
)
def test_bf16_is_near_fp32(name, layout, sharded, device):
    found, expected = small_step(name, device, "bfloat16", layout, sharded=sharded), reference(name)
    assert math.isfinite(found.loss)
    assert all(torch.isfinite(gradient).all() for gradient in found.gradients.values())
    assert found.loss == pytest.approx(expected.loss, rel=BF16["loss"])
    assert cosine(found.gradients, expected.gradients) > BF16["cosine"]
    assert other_proposals(found, expected) <= BF16["other_proposals"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", engine_strategies())
def test_sharded_over_one_rank_is_plain(name, device):
    sharded, plain = (small_step(name, device, "float32", "padded", sharded=spread) for spread in (True, False))
    assert sharded.loss == pytest.approx(plain.loss, rel=1e-6)
    assert_near(sharded.gradients, plain.gradients, 1e-5)
