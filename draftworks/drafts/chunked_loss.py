"""Chunked loss: a formula of a chunk's logits, summed over chunks, so that the logits of all labels never exist at once.

Autograd takes the gradients of a chunk while its logits are at hand. They are kept, and returned in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LossChunk(Protocol):
    """A part of the labels; `index` (a slice, or (n,) int64 without repetitions) selects its part of the inputs."""

    @property
    def index(self) -> slice | Tensor: ...


C = TypeVar("C", bound=LossChunk)
Sums = TypeVar("Sums", bound=tuple[Tensor | None, ...])
"""A NamedTuple of sums over labels: the loss, a scalar, comes first; the others are metric sums."""


def chunked_loss(
    formula: Callable[..., Sums], chunks: Iterable[C], inputs: Sequence[Tensor | None], shared: Sequence[Tensor] = ()
) -> Sums:
    """Return the formula's sums over all chunks.

    The loss is differentiable with respect to `inputs` and `shared`; the metric sums are float64 and are not.

    Args:
        formula: plain torch, called as formula(chunk, *its part of the inputs, *shared).
        chunks: at least one. No element of the inputs is in two chunks; the gradient of one that is in none is 0.
        inputs: tensors (N, …); None is handed to the formula as None.
        shared: tensors that every chunk uses whole. Their gradients are summed in at least float32.

    Raises:
        ValueError: there is no chunk.
    """
    with_grad = torch.is_grad_enabled()
    sources = (*inputs, *shared)
    trained = {
        slot: tensor for slot, tensor in enumerate(sources) if tensor is not None and with_grad and tensor.requires_grad
    }
    gradients = {slot: _gradient_buffer(tensor, wide=slot >= len(inputs)) for slot, tensor in trained.items()}
    totals: Sums | None = None
    for chunk in chunks:
        parts = [None if tensor is None else _select(tensor, chunk.index) for tensor in inputs] + list(shared)
        leaves = {
            slot: part.detach().requires_grad_()
            for slot, part in enumerate(parts)
            if slot in trained and part is not None
        }
        with torch.set_grad_enabled(bool(trained)):
            found = formula(chunk, *(leaves.get(slot, part) for slot, part in enumerate(parts)))
        loss = found[0]
        assert loss is not None, "the first of a formula's sums is its loss"
        if trained:
            # In a chunk without labels, kernels for empty tensors may leave out what they would read.
            taken = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            for slot, gradient in zip(leaves, taken):
                if slot >= len(inputs):
                    gradients[slot] += gradient
                elif isinstance(chunk.index, slice):
                    gradients[slot][chunk.index] = gradient
                else:
                    gradients[slot].index_copy_(0, chunk.index, gradient)
        terms = [loss.detach(), *(None if each is None else each.detach().double() for each in found[1:])]
        summed = terms if totals is None else [_add(one, other) for one, other in zip(totals, terms, strict=True)]
        make: Any = type(found)
        totals = make(*summed)
    if totals is None:
        raise ValueError("a chunked loss needs at least one chunk")
    kept = [gradients[slot].to(tensor.dtype) for slot, tensor in trained.items()]
    return type(totals)(_LossWithGradients.apply(totals[0], kept, *trained.values()), *totals[1:])


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def _select(tensor: Tensor, index: slice | Tensor) -> Tensor:
    # index_select and index_copy_ are several times faster than indexing on a CPU.
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _gradient_buffer(tensor: Tensor, wide: bool) -> Tensor:
    """Return zeros to collect the gradient in."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32) if wide else tensor.dtype)


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients with respect to the inputs are known beforehand."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *(gradient * grad_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
