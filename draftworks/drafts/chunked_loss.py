"""Chunked loss: a formula of a chunk's logits, summed over chunks, so that the logits of all labels never exist at once.

Autograd takes the gradients of a chunk while its logits are at hand. They are kept, and returned in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

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
    """
    with_grad = torch.is_grad_enabled()
    sources = (*inputs, *shared)
    gradients = [_gradient_buffer(tensor, with_grad, wide=slot >= len(inputs)) for slot, tensor in enumerate(sources)]
    trained = [slot for slot, gradient in enumerate(gradients) if gradient is not None]
    totals: list[Tensor | None] = []
    for chunk in chunks:
        parts = [tensor if tensor is None else _select(tensor, chunk.index) for tensor in inputs] + list(shared)
        for slot in trained:
            parts[slot] = parts[slot].detach().requires_grad_()
        with torch.set_grad_enabled(bool(trained)):
            found = formula(chunk, *parts)
        if trained:
            for slot, gradient in zip(trained, torch.autograd.grad(found[0], [parts[slot] for slot in trained])):
                if slot >= len(inputs):
                    gradients[slot] += gradient
                elif isinstance(chunk.index, slice):
                    gradients[slot][chunk.index] = gradient
                else:
                    gradients[slot].index_copy_(0, chunk.index, gradient)
        loss, *others = (each if each is None else each.detach() for each in found)
        terms = [loss, *(each if each is None else each.double() for each in others)]
        totals = [one if one is None else one + other for one, other in zip(terms, totals)] if totals else terms
    kept = [gradients[slot].to(sources[slot].dtype) for slot in trained]
    loss = _LossWithGradients.apply(totals[0], kept, *(sources[slot] for slot in trained))
    return type(found)(loss, *totals[1:])


def _select(tensor: Tensor, index: slice | Tensor) -> Tensor:
    # index_select and index_copy_ are several times faster than indexing on a CPU.
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _gradient_buffer(tensor: Tensor | None, with_grad: bool, wide: bool) -> Tensor | None:
    """Return zeros to collect the gradient in, or None for a tensor that needs no gradient."""
    if tensor is None or not (with_grad and tensor.requires_grad):
        return None
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32) if wide else tensor.dtype)


class _LossWithGradients(torch.autograd.Function):
    """A loss whose gradients with respect to the inputs are known beforehand."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        return None, None, *(gradient * grad_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
