"""Objectives of single labels: their values beside the formulas, their gradients beside the derivatives by hand."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from draftworks.drafts.objectives import (
    Blend,
    CrossEntropy,
    FixedBlend,
    LogAcceptance,
    MeanBlend,
    MeanLogAcceptance,
    Objective,
)

STEP = 1


class Labels(NamedTuple):
    """Logits, teacher's distributions and the teacher's mass in the draft vocabulary, of n labels."""

    logits: Tensor
    q: Tensor
    mass: Tensor

    @property
    def p(self) -> Tensor:
        return self.logits.softmax(-1)

    @property
    def ce(self) -> Tensor:
        return -(self.q * self.logits.log_softmax(-1)).sum(-1)

    @property
    def acceptance(self) -> Tensor:
        return torch.minimum(self.q * self.mass, self.p).sum(-1)


@pytest.fixture
def labels() -> Labels:
    """Nine labels over seven tokens, with part of the teacher's mass outside these."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 9, 7, generator=generator, dtype=torch.float64) * 2
    mass = 0.3 + 0.7 * torch.rand(9, 1, generator=generator, dtype=torch.float64)
    return Labels(logits, teacher.softmax(-1), mass)


def losses_of(objective: Objective, labels: Labels) -> Tensor:
    steps = torch.full((len(labels.logits),), STEP)
    return objective.label_losses(labels.ce, labels.acceptance, steps)


def gradient_of(objective: Objective, labels: Labels) -> Tensor:
    leaf = labels.logits.clone().requires_grad_()
    return torch.autograd.grad(losses_of(objective, labels._replace(logits=leaf)).sum(), leaf)[0]


def ce_derivative(labels: Labels) -> Tensor:
    return labels.p - labels.q


def acceptance_derivative(labels: Labels) -> Tensor:
    short = labels.p * (labels.p < labels.q * labels.mass)
    return short - labels.p * short.sum(-1, keepdim=True)


def blend_share(labels: Labels) -> Tensor:
    return 3 * torch.exp(-2 * labels.acceptance)


PLAIN = [
    (CrossEntropy(), lambda x: x.ce, ce_derivative),
    (
        LogAcceptance(),
        lambda x: -x.acceptance.log(),
        lambda x: -acceptance_derivative(x) / x.acceptance[:, None],
    ),
    (
        LogAcceptance((5.0, 0.25)),
        lambda x: -0.25 * x.acceptance.log(),
        lambda x: -0.25 * acceptance_derivative(x) / x.acceptance[:, None],
    ),
    (
        Blend(3.0, 2.0),
        lambda x: blend_share(x) * x.ce + (1 - blend_share(x)) * (1 - x.acceptance),
        lambda x: blend_share(x)[:, None] * ce_derivative(x) - (1 - blend_share(x))[:, None] * acceptance_derivative(x),
    ),
    (
        FixedBlend((9.0, 0.5), (9.0, 4.0)),
        lambda x: 0.5 * x.ce + 4 * (1 - x.acceptance),
        lambda x: 0.5 * ce_derivative(x) - 4 * acceptance_derivative(x),
    ),
]


@pytest.mark.parametrize(("objective", "plain", "derivative"), PLAIN)
def test_losses_and_derivatives_are_those_of_the_formulas(labels, objective, plain, derivative):
    torch.testing.assert_close(losses_of(objective, labels), plain(labels), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_of(objective, labels), derivative(labels), rtol=0, atol=1e-12)


def test_a_label_that_is_never_accepted_costs_nothing_and_teaches_nothing():
    labels = Labels(torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0]]))
    assert labels.acceptance == 0
    assert losses_of(LogAcceptance(), labels) == 0
    assert gradient_of(LogAcceptance(), labels).tolist() == [[0, 0]]


def test_the_derivative_of_log_acceptance_is_bounded_however_rare_acceptance_is():
    labels = Labels(torch.tensor([[60.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.7, 0.3]]), torch.tensor([[1.0]]))
    assert losses_of(LogAcceptance(), labels) > 50
    assert gradient_of(LogAcceptance(), labels).abs().max() <= 1


def test_a_blend_that_is_all_cross_entropy_is_cross_entropy(labels):
    for found, expected in (
        (losses_of(Blend(1.0, 0.0), labels), losses_of(CrossEntropy(), labels)),
        (gradient_of(Blend(1.0, 0.0), labels), gradient_of(CrossEntropy(), labels)),
    ):
        torch.testing.assert_close(found, expected)


def test_means_over_a_batch_become_weights_of_its_labels():
    accepted, taught = torch.tensor([3.0, 1.0, 0.0]).double(), torch.tensor([4.0, 2.0, 0.0]).double()
    assert MeanLogAcceptance().for_batch(accepted, taught) == LogAcceptance((0.25, 0.5, 1.0))
    blend = MeanBlend(2.0, 1.5, positions=10).for_batch(accepted, taught)
    shares = 2 * torch.exp(-1.5 * torch.tensor([0.75, 0.5, 0.0]).double())
    assert blend.ce_weights == pytest.approx((shares / 10).tolist())
    assert blend.miss_weights == pytest.approx(((1 - shares) / torch.tensor([4, 2, 1])).tolist())
