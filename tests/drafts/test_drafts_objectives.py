"""Objectives of single labels: their values beside the formulas, their gradients beside the derivatives by hand.
Losses and gradients of a softmax against autograd of their formulas; searches by block against torch's own.
Rung 1 of sampling servers is what verification accepts of a first proposal, on average over what the draft proposes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftworks.config.decoding import Decoding
from draftworks.drafts.logit_losses import (
    BLOCK,
    SoftLabels,
    compare_labels,
    compare_teacher,
    cross_entropy,
    find_argmax,
    find_largest,
    log_probs_at,
)
from draftworks.drafts.objectives import (
    Blend,
    CrossEntropy,
    FixedBlend,
    LogAcceptance,
    MeanBlend,
    MeanLogAcceptance,
    Objective,
)
from draftworks.drafts.sampling import (
    distribution,
    find_outcomes,
    find_served_targets,
    find_target_distribution,
    measure_acceptance,
    name_served_sums,
)
from draftworks.drafts.strategy import Proposal

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


ROWS, VOCAB = 6, 23


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw_ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


def gradients(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("rows", [(ROWS,), (2, ROWS)])
def test_log_probabilities_and_gradients_are_those_of_log_softmax(rows):
    logits, weights = draw(*rows, VOCAB).requires_grad_(), draw(*rows, 4, seed=2)
    ids = draw_ids(*rows, 4)
    ids[..., 1] = ids[..., 0]  # a label that is a candidate too
    found, expected = log_probs_at(logits.clone(), ids), logits.log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        gradients((weights * found).sum(), logits), gradients((weights * expected).sum(), logits)
    )


def test_distance_and_its_gradient_are_those_of_the_formula():
    logits, weights = draw(3, ROWS, VOCAB).requires_grad_(), draw(2, 3, ROWS, seed=2)
    taught, rows, labels = draw(4, VOCAB, seed=3), torch.tensor([3, 0, 0, 1, 2, 3]), draw_ids(3, ROWS)
    found = compare_labels(logits.clone(), labels, SoftLabels(taught, rows, temperature=0.7))
    q = (taught / 0.7).softmax(-1)[rows]
    log_p = logits.log_softmax(-1)
    expected = (-log_p.gather(-1, labels[..., None])[..., 0], (log_p.exp() - q).abs().sum(-1) / 2)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (sum((w * each).sum() for w, each in zip(weights, both)) for both in (found, expected))
    torch.testing.assert_close(gradients(ours, logits), gradients(theirs, logits))


@pytest.mark.parametrize("with_mass", [False, True])
def test_losses_of_a_teacher_and_their_gradients_are_those_of_the_formulas(with_mass):
    logits, weights = draw(ROWS, VOCAB).requires_grad_(), draw(2, ROWS, seed=2)
    q, mass = draw(ROWS, VOCAB, seed=3).softmax(-1), torch.linspace(0, 1, ROWS, dtype=torch.float64)
    found = compare_teacher(logits.clone(), q, mass if with_mass else None)
    log_p = logits.log_softmax(-1)
    ce, overlap = -(q * log_p).sum(-1), torch.minimum(log_p.exp(), q * mass[:, None]).sum(-1)
    torch.testing.assert_close(found.ce, ce)
    ours, theirs = weights[0] @ found.ce, weights[0] @ ce
    if with_mass:
        torch.testing.assert_close(found.overlap, overlap)
        ours, theirs = ours + weights[1] @ found.overlap, theirs + weights[1] @ overlap
    else:
        assert found.overlap is None
    torch.testing.assert_close(gradients(ours, logits), gradients(theirs, logits))


def test_values_of_a_small_case_are_these():
    logits = torch.tensor([[0.0, math.log(3), math.log(4)]])  # p = 1/8, 3/8, 4/8
    q = torch.tensor([[0.25, 0.25, 0.5]])
    labels = compare_labels(logits.clone(), torch.tensor([1]), SoftLabels(q.log(), torch.tensor([0])))
    teacher = compare_teacher(logits, q, torch.tensor([0.5]))
    torch.testing.assert_close(labels.ce, torch.tensor([math.log(8 / 3)]))
    torch.testing.assert_close(labels.distance, torch.tensor([0.125]))
    torch.testing.assert_close(teacher.ce, torch.tensor([math.log(8) - 0.25 * math.log(3) - 0.5 * math.log(4)]))
    torch.testing.assert_close(teacher.overlap, torch.tensor([0.5]))


def test_a_token_whose_probability_is_no_float_has_a_finite_loss():
    logits = torch.tensor([[300.0, 0.0, -500.0]])
    torch.testing.assert_close(cross_entropy(logits.clone(), torch.tensor([2])), torch.tensor([800.0]))
    torch.testing.assert_close(compare_teacher(logits, torch.tensor([[0.0, 0.0, 1.0]])).ce, torch.tensor([800.0]))


def test_a_draft_that_agrees_with_its_teacher_has_distance_and_gradient_zero():
    logits = draw(ROWS, VOCAB).float().requires_grad_()
    same = SoftLabels(logits.detach(), torch.arange(ROWS))
    distance = compare_labels(logits.clone(), draw_ids(ROWS), same).distance
    assert not distance.any()
    assert not gradients(distance.sum(), logits).any()


def test_rows_may_be_none():
    logits = torch.empty(0, VOCAB, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    soft = SoftLabels(logits.detach(), none)
    losses = [cross_entropy(logits.clone(), none), *compare_labels(logits.clone(), none, soft)]
    losses += [each for each in compare_teacher(logits.clone(), logits.detach(), torch.empty(0)) if each is not None]
    assert all(each.shape == (0,) for each in losses)
    assert find_argmax(torch.empty(0, 4 * BLOCK)).shape == (0,)


@given(vocab=st.integers(1, 5 * BLOCK), values=st.integers(1, 400), seed=st.integers(0, 2**31))
def test_the_argmax_is_the_first_largest_whatever_the_width(vocab: int, values: int, seed: int):
    """With few values there are many equals."""
    logits = torch.randint(values, (2, 3, vocab), generator=torch.Generator().manual_seed(seed)).float()
    expected = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(find_argmax(logits), expected)


@given(count=st.integers(1, 3), vocab=st.integers(3, 9 * BLOCK), values=st.integers(1, 400), seed=st.integers(0, 2**31))
def test_the_largest_have_the_values_of_topk_and_are_different(count: int, vocab: int, values: int, seed: int):
    logits = torch.randint(values, (4, vocab), generator=torch.Generator().manual_seed(seed)).float()
    found = find_largest(logits, count)
    assert torch.equal(logits.gather(-1, found), logits.topk(count).values)
    assert all(len(set(row)) == count for row in found.tolist())


def test_a_row_with_a_nan_has_its_index_as_argmax():
    logits = torch.zeros(2, 4 * BLOCK)
    logits[1, 150] = torch.nan
    assert find_argmax(logits).tolist() == [0, 150]


SERVED_TOKENS = 6
SERVED = (
    Decoding(0.7, "greedy_draft"),
    Decoding(0.7, "rejection"),
    Decoding(1.3, "greedy_draft", top_k=3),
    Decoding(1.3, "rejection", top_k=4, top_p=0.8),
)


def accepted_by_verification(draft: torch.Tensor, target: torch.Tensor, decoding: Decoding) -> float:
    """The chance that one proposal is accepted, from every proposal that can be made."""
    p = find_target_distribution(target, decoding).expand(2, -1)
    if decoding.rule == "greedy_draft":
        return float(find_outcomes(Proposal(draft.argmax()[None]), p, by_block=False).chances[1])
    q = distribution(draft, decoding.temperature)
    chances = [
        find_outcomes(Proposal(torch.tensor([x]), q[None]), p, by_block=False).chances[1] for x in range(SERVED_TOKENS)
    ]
    return float(q @ torch.stack(chances))


@given(st.integers(0, 10_000))
def test_it_is_what_verification_accepts(seed: int):
    generator = torch.Generator().manual_seed(seed)
    draft, target = (2 * torch.randn(3, SERVED_TOKENS, generator=generator, dtype=torch.float64) for _ in range(2))
    found = measure_acceptance(draft, find_served_targets(target, SERVED), SERVED)
    expected = [[accepted_by_verification(*rows, each) for rows in zip(draft, target)] for each in SERVED]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_with_a_reduced_vocabulary_the_targets_probability_is_of_all_its_tokens():
    """The likeliest token, with 0.6, is unknown to the draft, which says the second with certainty: 0.3 and not 0.75."""
    target, known = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([1, 2])
    served = (Decoding(1.0, "greedy_draft"), Decoding(1.0, "rejection"), Decoding(1.0, "greedy_draft", top_k=1))
    draft = torch.tensor([[50.0, 0.0]])
    found = measure_acceptance(draft, find_served_targets(target, served, known), served)
    assert found.flatten().tolist() == pytest.approx([0.3, 0.3, 0.0])


def test_sums_are_named_by_temperature_cuts_and_rule():
    named = name_served_sums(SERVED, torch.arange(8.0).view(4, 2))
    assert named["sampled_acceptance_t0.7_rejection_sums"].tolist() == [2, 3]
    assert named["sampled_acceptance_t1.3_k4_p0.8_rejection_sums"].tolist() == [6, 7]
    assert len(named) == len(SERVED)
