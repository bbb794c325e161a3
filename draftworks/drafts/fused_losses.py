"""Losses of rows of logits by Triton kernels: logits stay in the two bytes that a product wrote, sums are of four.

Beside a read for log-sum-exp and argmax there is one read and one write, of the gradient over the logits. The formulas are
those of draftworks.drafts.logit_losses, which chooses between these functions and torch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

LANES = 2048
"""Logits that a program takes at a time."""


class RowSums(NamedTuple):
    """Of every row: log Σ exp of its logits float32, and the first index of the largest int64, (n,) each."""

    lse: Tensor
    argmax: Tensor


@triton.jit
def _sum_rows(logits, scale, lse, argmax, vocab, lanes: tl.constexpr):
    """Each lane keeps its largest logit, where it was, and its sum relative to it: one exponential a logit."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((lanes,), float("-inf"), tl.float32)
    total = tl.zeros((lanes,), tl.float32)
    place = tl.zeros((lanes,), tl.int32)
    for start in range(0, vocab, lanes):
        at = start + tl.arange(0, lanes)
        z = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale
        smaller = tl.exp(tl.where(z == largest, 0.0, -tl.abs(z - largest)))  # -inf is equal to -inf, their gap is nan
        grows = z > largest
        total = tl.where(grows, total * smaller + 1, total + smaller)
        place = tl.where(grows, at, place)
        largest = tl.where(grows, z, largest)
    top = tl.max(largest, 0)
    relative = tl.where(largest == top, 0.0, largest - top)
    tl.store(lse + row, top + tl.log(tl.sum(total * tl.exp(relative), 0)))
    tl.store(argmax + row, tl.min(tl.where(largest == top, place, vocab), 0).to(tl.int64))


@triton.jit
def _scale_softmax(logits, lse, along, vocab, lanes: tl.constexpr):
    """z becomes along · softmax(z)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * lanes + tl.arange(0, lanes)
    here = logits + row * vocab + at
    z = tl.load(here, mask=at < vocab, other=float("-inf")).to(tl.float32)
    tl.store(here, (tl.exp(z - tl.load(lse + row)) * tl.load(along + row)).to(here.dtype.element_ty), mask=at < vocab)


@triton.jit
def _compare_rows(logits, lse, taught, taught_lse, which, scale, distance, mean, vocab, lanes: tl.constexpr):
    """½‖p - q‖₁, and Σ p ⊙ sign(p - q)."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(which + row)
    own, theirs = tl.load(lse + row), tl.load(taught_lse + source)
    far = tl.zeros((lanes,), tl.float32)
    along = tl.zeros((lanes,), tl.float32)
    for start in range(0, vocab, lanes):
        at = start + tl.arange(0, lanes)
        z = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        t = tl.load(taught + source * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale
        p = tl.exp(z - own)
        gap = p - tl.exp(t - theirs)
        far += tl.abs(gap)
        along += tl.where(gap > 0, p, tl.where(gap < 0, -p, 0.0))
    tl.store(distance + row, tl.sum(far, 0) / 2)
    tl.store(mean + row, tl.sum(along, 0))


@triton.jit
def _take_compared(
    logits, lse, taught, taught_lse, which, scale, mean, labels, grad_label, grad_distance, vocab, lanes: tl.constexpr
):
    """z becomes the gradient of what `_compare_rows` has found and of the label's log-probability."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(which + row)
    at = tl.program_id(1) * lanes + tl.arange(0, lanes)
    here = logits + row * vocab + at
    z = tl.load(here, mask=at < vocab, other=float("-inf")).to(tl.float32)
    t = tl.load(taught + source * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale
    p = tl.exp(z - tl.load(lse + row))
    gap = p - tl.exp(t - tl.load(taught_lse + source))
    sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
    of_label, half = tl.load(grad_label + row), tl.load(grad_distance + row) / 2
    grad = p * (half * (sign - tl.load(mean + row)) - of_label) + tl.where(at == tl.load(labels + row), of_label, 0.0)
    tl.store(here, grad.to(here.dtype.element_ty), mask=at < vocab)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
    kernel[grid](*args, LANES, num_warps=8)


def _tile(logits: Tensor) -> tuple[int, int]:
    return len(logits), triton.cdiv(logits.shape[1], LANES)


def sum_rows(logits: Tensor, scale: float = 1.0) -> RowSums:
    """Return the sums of logits · scale, which are (n, V), contiguous, of two or four bytes."""
    count, vocab = logits.shape
    lse = torch.empty(count, dtype=torch.float32, device=logits.device)
    argmax = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        _launch(_sum_rows, (count,), logits, scale, lse, argmax, vocab)
    return RowSums(lse, argmax)


class FusedLabels(torch.autograd.Function):
    """Log-probabilities at ids (n, K) of logits (n, V), float32, and the argmax (n,). The gradient takes the logits' memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor):
        lse, argmax = sum_rows(logits)
        log_probs = logits.gather(-1, ids).float().sub_(lse[:, None])
        ctx.save_for_backward(logits, lse, ids, log_probs)
        ctx.mark_non_differentiable(argmax)
        return log_probs, argmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, lse, ids, log_probs = ctx.saved_tensors
        along = grad.sum(-1).neg_()  # (n,), the gradient of lse
        # In float32, and the same wherever an id is there twice: of two bytes, sums would be rounded a second time.
        of_ids = ((ids[:, :, None] == ids[:, None, :]) * grad[:, None, :]).sum(-1)
        of_ids = of_ids.addcmul_(along[:, None], log_probs.exp())
        if len(logits):
            _launch(_scale_softmax, _tile(logits), logits, lse, along, logits.shape[1])
        return logits.scatter_(-1, ids, of_ids.to(logits.dtype)), None


class FusedComparison(torch.autograd.Function):
    """Log-probability of labels (n,), and ½‖p - q‖₁ with q = softmax(scale · taught[which]), (n,) each, float32.

    Logits are (n, V), those that are taught (u, V), `which` (n,) int64. The gradient takes the logits' memory.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, taught: Tensor, which: Tensor, scale: float):
        labels, which = labels.contiguous(), which.contiguous()
        lse, taught_lse = sum_rows(logits).lse, sum_rows(taught, scale).lse
        distance, mean = torch.empty_like(lse), torch.empty_like(lse)
        sides = (logits, lse, taught, taught_lse, which, scale)
        if len(logits):
            _launch(_compare_rows, (len(logits),), *sides, distance, mean, logits.shape[1])
        log_probs = logits.gather(-1, labels[:, None])[:, 0].float().sub_(lse)
        ctx.save_for_backward(logits, lse, taught, taught_lse, which, mean, labels)
        ctx.scale = scale
        return log_probs, distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_label: Tensor, grad_distance: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, lse, taught, taught_lse, which, mean, labels = ctx.saved_tensors
        if len(logits):
            sides = (logits, lse, taught, taught_lse, which, ctx.scale, mean, labels)
            given = (grad_label.contiguous(), grad_distance.contiguous())
            _launch(_take_compared, _tile(logits), *sides, *given, logits.shape[1])
        return logits, None, None, None, None


@torch.enable_grad()
def equals_torch(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels find torch's log-probabilities, distances and gradients, for rows that no tile divides."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 3, 2 * LANES + 5
    logits, taught = ((3 * torch.randn(n, vocab, generator=generator)).to(device, dtype) for n in (rows, 2))
    labels = torch.tensor([0, LANES, vocab - 1], device=device)
    which = torch.tensor([1, 0, 1], device=device)
    found, expected = [], []
    for fused in (True, False):
        leaf = logits.clone().requires_grad_()
        if fused:
            log_probs, argmax = FusedLabels.apply(leaf.clone(), labels[:, None])
            label, distance = FusedComparison.apply(leaf.clone(), labels, taught, which, 0.5)
        else:
            p, q = leaf.float().softmax(-1), (taught.float() / 2).softmax(-1)[which]
            log_probs, argmax = leaf.float().log_softmax(-1).gather(-1, labels[:, None]), leaf.argmax(-1)
            label, distance = log_probs[:, 0], (p - q).abs().sum(-1) / 2
        loss = log_probs.sum() + (label * torch.arange(1, 4, device=device)).sum() + 2 * distance.sum()
        result = [log_probs, argmax.float(), label, distance, torch.autograd.grad(loss, leaf)[0].float()]
        (found if fused else expected).extend(result)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(found, expected, strict=True))
