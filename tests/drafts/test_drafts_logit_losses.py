"""Losses and gradients of a softmax against autograd of their formulas; searches by block against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
