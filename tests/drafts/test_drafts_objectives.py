"""The objectives of single rows beside plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftworks.drafts.objectives import Blend, CrossEntropy, FixedBlend, LogAcceptance, MeanBlend, MeanLogAcceptance
from draftworks.drafts.teacher import Pupils

STEP = 1


@pytest.fixture
def rows() -> tuple[Tensor, Pupils]:
    """Logits of nine rows over seven tokens, and teachers with part of their mass outside these."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 9, 7, generator=generator, dtype=torch.float64) * 2
    mass = 0.3 + 0.7 * torch.rand(9, 1, generator=generator, dtype=torch.float64)
    return logits, Pupils(torch.arange(9), teacher.softmax(-1), teacher.argmax(-1), mass)


def cross_entropies(logits: Tensor, pupils: Pupils) -> Tensor:
    return -(pupils.q * logits.log_softmax(-1)).sum(-1)


def acceptances(logits: Tensor, pupils: Pupils) -> Tensor:
    return torch.minimum(pupils.q * pupils.mass, logits.softmax(-1)).sum(-1)


def blended(logits: Tensor, pupils: Pupils) -> Tensor:
    accepted = acceptances(logits, pupils)
    share = 3 * torch.exp(-2 * accepted.detach())
    return share * cross_entropies(logits, pupils) + (1 - share) * (1 - accepted)


PLAIN = [
    (CrossEntropy(), cross_entropies),
    (LogAcceptance(), lambda *case: -acceptances(*case).log()),
    (LogAcceptance((5.0, 0.25)), lambda *case: -0.25 * acceptances(*case).log()),
    (Blend(3.0, 2.0), blended),
    (FixedBlend((9.0, 0.5), (9.0, 4.0)), lambda *case: 0.5 * cross_entropies(*case) + 4 * (1 - acceptances(*case))),
]


@pytest.mark.parametrize(("objective", "plain"), PLAIN)
def test_sums_and_derivatives_are_those_of_the_plain_formula(rows, objective, plain):
    logits, pupils = rows
    graded = objective.grade(STEP, logits.clone(), pupils, with_grad=True)
    leaf = logits.clone().requires_grad_()
    expected = plain(leaf, pupils).sum()
    torch.testing.assert_close(graded.loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(graded.d_logits, torch.autograd.grad(expected, leaf)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(graded.accepted, acceptances(logits, pupils).sum())
    assert graded.correct == (logits.argmax(-1) == pupils.labels).sum()


@pytest.mark.parametrize("objective", [objective for objective, _ in PLAIN])
def test_grading_without_gradient_gives_the_same_sums(rows, objective):
    logits, pupils = rows
    learning = objective.grade(STEP, logits.clone(), pupils, with_grad=True)
    looking = objective.grade(STEP, logits.clone(), pupils, with_grad=False)
    assert looking.d_logits is None
    assert looking[:3] == learning[:3]


def test_a_row_that_is_never_accepted_costs_nothing_and_teaches_nothing():
    logits = torch.tensor([[1000.0, 0.0]])
    pupils = Pupils(torch.tensor([0]), torch.tensor([[0.0, 1.0]]), torch.tensor([1]), torch.tensor([[1.0]]))
    graded = LogAcceptance().grade(STEP, logits, pupils, with_grad=True)
    assert graded.loss == 0
    assert graded.d_logits.tolist() == [[0, 0]]


def test_the_derivative_of_log_acceptance_is_bounded_however_rare_acceptance_is():
    logits = torch.tensor([[60.0, 0.0, 1.0]])
    pupils = Pupils(torch.tensor([0]), torch.tensor([[0.0, 0.7, 0.3]]), torch.tensor([1]), torch.tensor([[1.0]]))
    graded = LogAcceptance().grade(STEP, logits, pupils, with_grad=True)
    assert graded.loss > 50
    assert graded.d_logits.abs().max() <= 1


def test_a_blend_that_is_all_cross_entropy_is_cross_entropy(rows):
    logits, pupils = rows
    blend = Blend(1.0, 0.0).grade(STEP, logits.clone(), pupils, with_grad=True)
    plain = CrossEntropy().grade(STEP, logits.clone(), pupils, with_grad=True)
    torch.testing.assert_close(blend, plain)


def test_means_over_a_batch_become_weights_of_its_rows():
    accepted, taught = torch.tensor([3.0, 1.0, 0.0]).double(), torch.tensor([4.0, 2.0, 0.0]).double()
    assert MeanLogAcceptance().given(accepted, taught) == LogAcceptance((0.25, 0.5, 1.0))
    blend = MeanBlend(2.0, 1.5, positions=10).given(accepted, taught)
    shares = 2 * torch.exp(-1.5 * torch.tensor([0.75, 0.5, 0.0]).double())
    assert blend.ce_weights == pytest.approx((shares / 10).tolist())
    assert blend.miss_weights == pytest.approx(((1 - shares) / torch.tensor([4, 2, 1])).tolist())
