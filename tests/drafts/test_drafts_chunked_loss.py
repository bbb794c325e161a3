"""`chunked_loss` against plain autograd of the same formula over everything at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, chunked_loss

HIDDEN, VOCAB = 5, 11


@dataclass(frozen=True)
class LabelChunk:
    index: slice | Tensor
    labels: Tensor


@dataclass(frozen=True)
class Problem:
    """Cross-entropy under two heads, of states and of an offset that is another input."""

    states: Tensor
    offsets: Tensor
    head: Tensor
    bias: Tensor
    labels: Tensor

    @classmethod
    def random(cls, count: int, dtype: torch.dtype = torch.float64) -> Problem:
        generator = torch.Generator().manual_seed(count)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

        labels = torch.randint(VOCAB, (count,), generator=generator)
        return cls(leaf(count, HIDDEN), leaf(count, 1), leaf(VOCAB, HIDDEN), leaf(VOCAB), labels)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.states, self.offsets, self.head, self.bias

    def in_slices(self, size: int) -> list[LabelChunk]:
        starts = range(0, max(1, len(self.labels)), size)
        return [LabelChunk(slice(at, at + size), self.labels[at : at + size]) for at in starts]

    def in_random_order(self, size: int) -> list[LabelChunk]:
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        return [LabelChunk(index, self.labels[index]) for index in order.split(size)]

    def chunked(self, chunks: list[LabelChunk], formula: Callable[..., LossSums] | None = None) -> LossSums:
        return chunked_loss(formula or cross_entropy, chunks, [self.states, self.offsets], [self.head, self.bias])

    def at_once(self) -> LossSums:
        return cross_entropy(LabelChunk(slice(None), self.labels), *self.leaves)


def cross_entropy(chunk: LabelChunk, states: Tensor, offsets: Tensor, head: Tensor, bias: Tensor) -> LossSums:
    logits = F.linear(states, head, bias) * (1 + offsets)
    ce = F.cross_entropy(logits, chunk.labels, reduction="none")
    weights = 1 + chunk.labels.to(ce.dtype)
    corrects = (logits.argmax(-1) == chunk.labels).sum()
    return LossSums(torch.dot(weights, ce), {"loss": ce.sum(), "corrects": corrects})


def same(found: LossSums, expected: LossSums, problem: Problem, relative: float = 1e-12) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=relative, atol=relative)
    for name, total in expected.sums.items():
        torch.testing.assert_close(found.sums[name], total.detach().double(), rtol=relative, atol=relative)
    gradients = [torch.autograd.grad(losses.loss, problem.leaves) for losses in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=relative, atol=relative)


@given(count=st.integers(0, 13), size=st.integers(1, 15), random_order=st.booleans())
def test_losses_sums_and_gradients_are_those_of_everything_at_once(count: int, size: int, random_order: bool) -> None:
    problem = Problem.random(count)
    chunks = problem.in_random_order(size) if random_order else problem.in_slices(size)
    same(problem.chunked(chunks), problem.at_once(), problem)


def test_in_float32_they_are_the_same_to_rounding() -> None:
    problem = Problem.random(100, torch.float32)
    same(problem.chunked(problem.in_slices(7)), problem.at_once(), problem, relative=2e-5)


def test_gradients_follow_a_factor_on_the_loss_and_add_to_those_of_other_losses() -> None:
    problem = Problem.random(9)
    found, expected = problem.chunked(problem.in_slices(4)), problem.at_once()
    penalty = problem.head.square().sum()
    gradients = [
        torch.autograd.grad(3 * losses.loss + penalty, problem.leaves, retain_graph=True)
        for losses in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_an_input_in_no_chunk_has_gradient_zero() -> None:
    problem = Problem.random(10)
    problem.chunked(problem.in_slices(4)[:2]).loss.backward()
    assert problem.states.grad[:8].all()
    assert not problem.states.grad[8:].any()


def test_what_needs_no_gradient_gets_none_and_absent_inputs_are_handed_on() -> None:
    problem, seen = Problem.random(6), []

    def formula(chunk: LabelChunk, states: Tensor, nothing: None, head: Tensor) -> LossSums:
        seen.append((states.requires_grad, nothing, head.requires_grad))
        return cross_entropy(chunk, states, torch.zeros(1), head, problem.bias.detach())

    frozen = problem.head.detach()
    result = chunked_loss(formula, problem.in_slices(4), [problem.states, None], [frozen])
    result.loss.backward()
    assert seen == [(True, None, False)] * 2
    assert frozen.grad is None
    assert problem.states.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_gradients_are_summed_in_at_least_float32_and_returned_in_the_dtype_of_the_tensor(dtype) -> None:
    """In bfloat16 a sum of many small terms would stop growing at 256 of them."""
    count = 1000
    states = torch.ones(count, 1, dtype=dtype, requires_grad=True)
    shared = torch.ones(1, dtype=dtype, requires_grad=True)

    def formula(chunk: LabelChunk, states: Tensor, shared: Tensor) -> LossSums:
        total = (states * shared).float().sum()
        return LossSums(total, {})

    chunks = [LabelChunk(slice(at, at + 1), torch.zeros(1)) for at in range(count)]
    chunked_loss(formula, chunks, [states], [shared]).loss.backward()
    assert shared.grad.dtype == states.grad.dtype == dtype
    assert shared.grad == torch.tensor(float(count)).to(dtype)


def test_without_gradients_the_sums_are_the_same_and_nothing_is_recorded() -> None:
    problem = Problem.random(9)
    recorded = problem.chunked(problem.in_slices(4))
    with torch.no_grad():
        unrecorded = problem.chunked(problem.in_slices(4))
    assert recorded.loss.requires_grad
    assert not unrecorded.loss.requires_grad
    assert recorded.loss == unrecorded.loss
    assert recorded.sums == unrecorded.sums
    assert {(each.requires_grad, each.dtype) for each in recorded.sums.values()} == {(False, torch.float64)}


def test_nothing_of_a_chunk_outlives_it() -> None:
    """Neither its logits nor its graph, before the backward pass and after it."""
    problem, logits = Problem.random(12), []

    def formula(chunk: LabelChunk, states: Tensor, offsets: Tensor, head: Tensor, bias: Tensor) -> LossSums:
        product = F.linear(states, head, bias) * (1 + offsets)
        logits.append(weakref.ref(product))
        ce = F.cross_entropy(product, chunk.labels, reduction="sum")
        return LossSums(ce, {"ce": ce})

    result = problem.chunked(problem.in_slices(5), formula)
    assert len(logits) == 3
    assert not any(each() is not None for each in logits)
    kept = {tuple(each.shape) for each in result.loss.grad_fn.saved_tensors}
    assert kept == {tuple(leaf.shape) for leaf in problem.leaves}


def test_a_second_derivative_is_refused() -> None:
    problem = Problem.random(3)
    squared = problem.chunked(problem.in_slices(2)).loss.square()
    (gradient,) = torch.autograd.grad(squared, [problem.states], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
