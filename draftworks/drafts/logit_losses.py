"""Losses of logits: formulas summed over chunks of labels, and softmax losses with gradients in few passes over memory.

`chunked_loss` sums a formula of a chunk's logits over chunks, so that the logits of all labels never exist at once: autograd
takes the gradients of a chunk while its logits are at hand; they are kept, and returned in the backward pass.

In a formula, a pass that takes an exponential costs a CPU ten times as much as one that adds or multiplies. Autograd takes
one for log_softmax, one for its backward and one for each probability that is asked for; here one makes everything:

    p = softmax(z),   lse = max z - log max p,   log p_v = z_v - lse
    ∂(log p_v)/∂z = e_v - p,   ∂(-Σ_v q_v log p_v)/∂z = p - q      for Σ q = 1
    ∂(½‖p - q‖₁)/∂z = ½ p ⊙ (s - Σ_v p_v s_v)                      with s = sign(p - q)
    ∂(Σ_v min(p_v, q_v))/∂z = p ⊙ (m - Σ_v p_v m_v)                with m_v = 1 where p_v < q_v, else 0

Shapes: `…` are any dimensions of rows, V is the vocabulary. Gradients of these go to the logits alone, and can be taken once.
The logits are overwritten: their memory, which a core's cache still holds, takes the probabilities.

On a GPU with Triton the losses of labels are kernels that read logits as the product wrote them, in two bytes; see
draftworks.drafts.fused_losses.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

log = logging.getLogger(__name__)


class LossChunk(Protocol):
    """A part of the labels; `index` (a slice, or (n,) int64 without repetitions) selects its part of the inputs."""

    @property
    def index(self) -> slice | Tensor: ...


C = TypeVar("C", bound=LossChunk)


class LossSums(NamedTuple):
    """Sums over labels: `loss`, a differentiable scalar, and by name metric sums of one value or one by place, detached."""

    loss: Tensor
    sums: dict[str, Tensor]


def chunked_loss(
    formula: Callable[..., LossSums],
    chunks: Iterable[C],
    inputs: Sequence[Tensor | None],
    shared: Sequence[Tensor] = (),
) -> LossSums:
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
    total: Tensor | None = None
    sums: dict[str, Tensor] = {}
    for chunk in chunks:
        parts = [None if tensor is None else _select(tensor, chunk.index) for tensor in inputs] + list(shared)
        leaves = {
            slot: part.detach().requires_grad_()
            for slot, part in enumerate(parts)
            if slot in trained and part is not None
        }
        with torch.set_grad_enabled(bool(trained)):
            loss, found = formula(chunk, *(leaves.get(slot, part) for slot, part in enumerate(parts)))
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
        total = loss.detach() if total is None else total + loss.detach()
        sums = {name: each.detach().double() + sums.get(name, 0) for name, each in found.items()}
    if total is None:
        raise ValueError("a chunked loss needs at least one chunk")
    kept = [gradients[slot].to(tensor.dtype) for slot, tensor in trained.items()]
    return LossSums(_LossWithGradients.apply(total, kept, *trained.values()), sums)


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


BLOCK = 64
"""Logits of which the largest is found at once."""
DOT_ELEMENTS = 2**16
"""Products that are held at a time on a CPU."""


def find_argmax(logits: Tensor) -> Tensor:
    """Return the first index of the largest logit of each row, (…, V) to (…) int64."""
    logits = logits.detach()
    if logits.device.type != "cpu" or logits.shape[-1] < 2 * BLOCK:
        return logits.max(-1).indices
    blocks = _find_blocks(logits, 1)
    return blocks.ids.gather(-1, blocks.logits.max(-1, keepdim=True).indices)[..., 0]


def find_largest(logits: Tensor, count: int) -> Tensor:
    """Return the indices of the largest logits of each row, the largest first, (…, V) to (…, count) int64."""
    logits = logits.detach()
    if logits.shape[-1] < 2 * BLOCK * count:
        return logits.topk(count, dim=-1).indices
    blocks = _find_blocks(logits, count)
    return blocks.ids.gather(-1, blocks.logits.topk(count, dim=-1).indices)


class _Blocks(NamedTuple):
    """Some blocks of each row, one after another: indices in the row int64, and logits, (…, count · BLOCK) each."""

    ids: Tensor
    logits: Tensor


def _find_blocks(logits: Tensor, count: int) -> _Blocks:
    """Return the `count` blocks with the largest maxima, which hold the `count` largest logits; for one, the first such.

    On a CPU a maximum with its index takes ten times as long as one without, and `topk` more, on a GPU ten times too: this
    way few logits need it.
    """
    vocab = logits.shape[-1]
    whole = vocab - vocab % BLOCK
    maxima = logits[..., :whole].unflatten(-1, (-1, BLOCK)).amax(-1)
    if whole < vocab:
        maxima = torch.cat([maxima, logits[..., whole:].amax(-1, keepdim=True)], dim=-1)
    best = maxima.max(-1, keepdim=True).indices if count == 1 else maxima.topk(count, dim=-1).indices
    ids = best[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)  # (…, count, BLOCK)
    beyond = ids >= vocab
    ids = ids.clamp_max_(vocab - 1).flatten(-2)
    return _Blocks(ids, logits.gather(-1, ids).masked_fill_(beyond.flatten(-2), -torch.inf))


class LabelScores(NamedTuple):
    """Of every row: cross-entropy of its label, and whether the label is the argmax, (…) each."""

    ce: Tensor
    hits: Tensor


class LabelLosses(NamedTuple):
    """Of every row: cross-entropy of its label, and ½‖p - q‖₁, (…) each."""

    ce: Tensor
    distance: Tensor


@dataclass(frozen=True)
class SoftLabels:
    """The target's distributions at n labels: softmax(logits / temperature), of logits (u, V) those at `rows` (n,) int64."""

    logits: Tensor
    rows: Tensor
    temperature: float = 1.0

    @cached_property
    def q(self) -> Tensor:
        """The distributions (n, V), of at least four bytes."""
        wide = at_least_float32(self.logits)
        scaled = wide if self.temperature == 1 else wide / self.temperature
        return scaled.softmax(-1).index_select(0, self.rows)


class TeacherLosses(NamedTuple):
    """Of every row: cross-entropy -Σ_v q_v log p_v, and Σ_v min(p_v, mass·q_v) if a mass was given, (…) each."""

    ce: Tensor
    overlap: Tensor | None


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_logits(product: Tensor) -> Tensor:
    """Return a product (…, V) as logits for the functions below: as it is where kernels read it, else of four bytes or more."""
    return product if kernels_work(product.device, product.dtype) else at_least_float32(product)


def score_labels(logits: Tensor, labels: Tensor) -> LabelScores:
    """Return how labels (n,) int64 fare under logits (n, V)."""
    if kernels_work(logits.device, logits.dtype):
        from draftworks.drafts.fused_losses import FusedLabels

        log_probs, argmax = FusedLabels.apply(logits.contiguous(), labels[:, None])
        return LabelScores(-log_probs[:, 0], argmax == labels)
    hits = find_argmax(logits) == labels  # before the logits are overwritten
    return LabelScores(cross_entropy(logits, labels), hits)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of the labels (…) int64 under logits (…, V), (…)."""
    return -log_probs_at(logits, labels[..., None])[..., 0]


def log_probs_at(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities (…, K) of some tokens (…, K) int64 under logits (…, V)."""
    if kernels_work(logits.device, logits.dtype):
        from draftworks.drafts.fused_losses import FusedLabels

        rows = logits.reshape(-1, logits.shape[-1])
        return FusedLabels.apply(rows, ids.reshape(-1, ids.shape[-1]))[0].view(ids.shape)
    return _LabelFunction.apply(logits, ids, None)[0]


def compare_labels(logits: Tensor, labels: Tensor, soft: SoftLabels) -> LabelLosses:
    """Return the losses of labels (…, n) int64 and of distributions at n labels under logits (…, n, V)."""
    if kernels_work(logits.device, logits.dtype):
        from draftworks.drafts.fused_losses import FusedComparison

        taught = (soft.logits.contiguous(), soft.rows.expand(labels.shape).reshape(-1), 1 / soft.temperature)
        rows = logits.reshape(-1, logits.shape[-1])
        log_probs, distance = FusedComparison.apply(rows, labels.reshape(-1), *taught)
        return LabelLosses(-log_probs.view(labels.shape), distance.view(labels.shape))
    log_probs, distance = _LabelFunction.apply(logits, labels[..., None], soft.q)
    return LabelLosses(-log_probs[..., 0], distance)


@functools.cache
def kernels_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether losses of labels are Triton's: on a GPU, where a probe finds torch's losses and gradients; else a warning."""
    if device.type != "cuda" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    try:
        from draftworks.drafts.fused_losses import equals_torch

        problem = None if equals_torch(device, dtype) else "its results differ from torch's"
    except Exception as error:  # no Triton, no compiler, no Python.h: many kinds
        problem = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
    if problem is not None:
        log.warning(
            "fused losses do not work here for %s (%s): torch's read logits in four bytes, slower", dtype, problem
        )
    return problem is None


def compare_teacher(logits: Tensor, q: Tensor, mass: Tensor | None = None) -> TeacherLosses:
    """Return the losses of distributions q (…, V), each of sum 1, and of mass·q with mass (…) from 0 to 1."""
    return TeacherLosses(*_TeacherFunction.apply(logits, q, mass))


class _Softmax(NamedTuple):
    """Probabilities (…, V), and log Σ exp of the logits (…)."""

    p: Tensor
    lse: Tensor

    @classmethod
    def overwrite(cls, logits: Tensor) -> _Softmax:
        logits = logits.detach()
        largest = logits.amax(-1)
        p = torch.softmax(logits, -1, out=logits)
        return cls(p, largest - p.amax(-1).log_())


def _dot_rows(x: Tensor, y: Tensor) -> Tensor:
    """Return the dot products of rows (…, V) of the same shape, (…)."""
    if x.device.type != "cpu" or not x.numel():
        return (x * y).sum(-1)
    # Products of a few rows at a time stay in a core's cache.
    rows = max(1, DOT_ELEMENTS // x.shape[-1])
    pieces = zip(x.flatten(0, -2).split(rows), y.flatten(0, -2).split(rows), strict=True)
    return torch.cat([(ours * theirs).sum(-1) for ours, theirs in pieces]).view(x.shape[:-1])


class _LabelFunction(torch.autograd.Function):
    """Log-probabilities at ids (…, K), and ½‖p - q‖₁ (…) unless q is None."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, q: Tensor | None):
        chosen = logits.gather(-1, ids)
        p, lse = _Softmax.overwrite(logits)
        log_probs = chosen.sub_(lse[..., None])
        distance = sign = None
        if q is not None:
            sign = p - q
            distance = sign.abs_().sum(-1).div_(2)
            torch.sub(p, q, out=sign).sign_()  # again, because a pass in place takes a fraction of one to new memory
        ctx.save_for_backward(p, ids, sign)
        return log_probs, distance

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor, grad_distance: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        p, ids, sign = ctx.saved_tensors
        along_p = grad_log_probs.sum(-1, keepdim=True).neg_()  # (…, 1), the gradient of lse, times -1
        if sign is None:
            grad = p.mul_(along_p)
        else:
            assert grad_distance is not None
            half = grad_distance[..., None] / 2
            mean = _dot_rows(p, sign)[..., None]
            grad = sign.mul_(half).add_(along_p.addcmul_(half, mean, value=-1)).mul_(p)
        return grad.scatter_add_(-1, ids, grad_log_probs), None, None


class _TeacherFunction(torch.autograd.Function):
    """Cross-entropy of q (…), and Σ min(p, mass·q) (…) unless mass is None."""

    @staticmethod
    def forward(ctx, logits: Tensor, q: Tensor, mass: Tensor | None):
        mean = _dot_rows(q, logits)
        p, lse = _Softmax.overwrite(logits)
        ce = lse.sub_(mean)
        overlap = smaller = None
        if mass is not None:
            bound = q * mass[..., None]
            overlap = torch.minimum(p, bound).sum(-1)
            smaller = torch.sub(bound, p, out=bound).sign_().clamp_(min=0)
        ctx.save_for_backward(p, q, smaller)
        return ce, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ce: Tensor, grad_overlap: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        p, q, smaller = ctx.saved_tensors
        grad_ce = grad_ce[..., None]
        if smaller is None:
            return p.sub_(q).mul_(grad_ce), None, None
        assert grad_overlap is not None
        grad_overlap = grad_overlap[..., None]
        mean = _dot_rows(p, smaller)[..., None]
        along_p = smaller.mul_(grad_overlap).add_(torch.addcmul(grad_ce, grad_overlap, mean, value=-1))
        return along_p.mul_(p).addcmul_(q, grad_ce, value=-1), None, None
