"""`ttt_attention` by a fused kernel: the causal block by torch's own, each diagonal merged in by log-sum-exp.

    w = softmax([lse_causal, s_1, …, s_i]),  s_j = q·k_j/√d,  o = w_0·o_causal + Σ_j w_j·v_j

For the gradients of the causal part the kernel's own backward is given the *merged* output and log-sum-exp: it rebuilds its
probabilities as exp(q·k - lse), which then are those of the whole softmax.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftworks.drafts.documents import Documents
from draftworks.drafts.flash_kernels import CAUSAL_KERNELS, PACKED_KERNELS, Attended, ByDocument, CausalKernel
from draftworks.strategies.eagle3.masked_attention import eager_ttt_attention


def fused_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents
) -> Tensor:
    """See `ttt_attention`; it knows no windows. Only where `fused_kernel_works`. Diagonals are a row's own, so only the causal block is told of
    documents."""
    kernel = _kernel(query.device, query.dtype, query.shape[-1], documents)
    return _FusedTttAttention.apply(kernel, query, len(keys), *keys, *values)


def _kernel(device: torch.device, dtype: torch.dtype, head_size: int, documents: Documents) -> CausalKernel:
    kernel = CAUSAL_KERNELS[device.type]
    if not documents.several:
        return kernel
    if packed_kernel_works(device, dtype, head_size):
        return PACKED_KERNELS[device.type](documents)
    return ByDocument(kernel, documents)


@functools.cache
def fused_kernel_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether there is a kernel that gives, merged, the eager path's output and gradients. Tried once, on a small row of
    one document and on one of several, where the kernel is handed strided parts.
    """
    if device.type not in CAUSAL_KERNELS:
        return False
    kernel = CAUSAL_KERNELS[device.type]
    one, several = (Documents.after_each_other(lengths, device) for lengths in ((7,), (3, 2, 2)))
    tried = ((kernel, one), (ByDocument(kernel, several), several))
    return all(_works(kernel, row, dtype, head_size) for kernel, row in tried)


@functools.cache
def packed_kernel_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """The same of a kernel that takes a whole packed row at once."""
    if device.type not in PACKED_KERNELS:
        return False
    documents = Documents.after_each_other((3, 2, 2), device)
    return _works(PACKED_KERNELS[device.type](documents), documents, dtype, head_size)


def _works(kernel: CausalKernel, documents: Documents, dtype: torch.dtype, head_size: int) -> bool:
    try:
        return _fused_equals_eager(kernel, documents, dtype, head_size)
    except (AttributeError, RuntimeError, TypeError):  # an operator that is missing, or has other arguments
        return False


@torch.enable_grad()
def _fused_equals_eager(kernel: CausalKernel, documents: Documents, dtype: torch.dtype, head_size: int) -> bool:
    """At step 1, in output and gradients."""

    def fused(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], _: Documents) -> Tensor:
        return _FusedTttAttention.apply(kernel, query, len(keys), *keys, *values)

    tolerance = 0.05 if dtype.itemsize == 2 else 1e-4
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        values = torch.randn(1, heads, sum(documents.lengths), head_size, generator=generator)
        return values.to(documents.begins.device, dtype)

    inputs, seed = [drawn(heads) for heads in (4, 2, 4, 2, 4)], drawn(4)
    results = []
    for attend in (fused, eager_ttt_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attend(leaves[0], leaves[1:3], leaves[3:], documents)
        results.append([output, *torch.autograd.grad(output, leaves, seed)])
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*results, strict=True))


class _FusedTttAttention(torch.autograd.Function):
    """`ttt_attention` with a fused kernel; arguments flat, because autograd sees only tensors at top level."""

    @staticmethod
    def forward(ctx, kernel: CausalKernel, query: Tensor, steps: int, *keys_and_values: Tensor) -> Tensor:
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        causal, lse, rest = kernel.forward(query, keys[0], values[0])
        wide, scale = lse.dtype, query.shape[-1] ** -0.5
        stacked = torch.stack([lse, *(_dots(query, key, wide).mul_(scale) for key in keys[1:])])
        lse = torch.logsumexp(stacked, dim=0)
        weights = stacked.sub_(lse).exp_()
        output = causal.to(wide).mul_(weights[0, ..., None]) if steps > 1 else causal
        for weight, value in zip(weights[1:], values[1:], strict=True):
            output.addcmul_(weight[..., None], value.to(wide))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, output, lse, weights, *keys_and_values)
        ctx.kernel, ctx.rest = kernel, rest
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, output, lse, weights, *keys_and_values = ctx.saved_tensors
        steps = len(keys_and_values) // 2
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        merged = Attended(output, lse, ctx.rest)
        d_query, d_key, d_value = ctx.kernel.backward(grad, query, keys[0], values[0], merged)
        d_keys, d_values = [d_key], [d_value]
        wide, scale = lse.dtype, query.shape[-1] ** -0.5
        inner = _dots(grad, output, wide) if steps > 1 else None
        for weight, key, value in zip(weights[1:], keys[1:], values[1:], strict=True):
            d_score = _dots(grad, value, wide).sub_(inner).mul_(weight).mul_(scale).to(query.dtype).unsqueeze(-1)
            d_query.addcmul_(d_score, key)
            d_keys.append(d_score * query)
            d_values.append(weight.to(query.dtype).unsqueeze(-1) * grad)
        return (None, d_query, None, *d_keys, *d_values)


def _dots(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Row-wise dot products (…, S, D) · (…, S, D): (…, S), products and sum in `dtype`."""
    return (x.to(dtype) * y.to(dtype)).sum(-1)
