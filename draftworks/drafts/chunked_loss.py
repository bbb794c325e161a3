"""A loss written as a formula of a chunk of rows, summed over chunks, so that the logits of all rows never exist at once.

The gradients of a chunk are taken by autograd while its logits are at hand, kept, and handed out in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RowChunk(Protocol):
    """Some of the rows."""

    @property
    def rows(self) -> slice: ...


C = TypeVar("C", bound=RowChunk)
Sums = TypeVar("Sums", bound=tuple[Tensor | None, ...])
"""A NamedTuple of sums over rows: first the loss, a scalar, then what is only counted."""


def chunked_loss(
    formula: Callable[..., Sums], chunks: Iterable[C], rows: Sequence[Tensor | None], shared: Sequence[Tensor] = ()
) -> Sums:
    """The formula's sums over all chunks; the loss is differentiable by `rows` and `shared`, the others are float64 and are not.

    Args:
        formula: plain torch, called as formula(chunk, *its part of the rows, *shared).
        chunks: at least one; no row is in two of them.
        rows: tensors (R, …); one that is None is handed on as it is.
        shared: what all rows use. Its gradients are summed in at least float32.
    """
    with_grad = torch.is_grad_enabled()
    inputs = (*rows, *shared)
    gradients = [_room_for(tensor, with_grad, wide=place >= len(rows)) for place, tensor in enumerate(inputs)]
    learning = [place for place, gradient in enumerate(gradients) if gradient is not None]
    sums: list[Tensor | None] = []
    for chunk in chunks:
        parts = [tensor if tensor is None else tensor[chunk.rows] for tensor in rows] + list(shared)
        for place in learning:
            parts[place] = parts[place].detach().requires_grad_()
        with torch.set_grad_enabled(bool(learning)):
            found = formula(chunk, *parts)
        if learning:
            for place, gradient in zip(learning, torch.autograd.grad(found[0], [parts[place] for place in learning])):
                if place < len(rows):
                    gradients[place][chunk.rows] = gradient
                else:
                    gradients[place] += gradient
        loss, *others = (each if each is None else each.detach() for each in found)
        terms = [loss, *(each if each is None else each.double() for each in others)]
        sums = [one if one is None else one + other for one, other in zip(terms, sums)] if sums else terms
    kept = [gradients[place].to(inputs[place].dtype) for place in learning]
    loss = _WithGradients.apply(sums[0], kept, *(inputs[place] for place in learning))
    return type(found)(loss, *sums[1:])


def _room_for(tensor: Tensor | None, with_grad: bool, wide: bool) -> Tensor | None:
    if tensor is None or not (with_grad and tensor.requires_grad):
        return None
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32) if wide else tensor.dtype)


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients by the inputs are known."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        return None, None, *(gradient * grad_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)
