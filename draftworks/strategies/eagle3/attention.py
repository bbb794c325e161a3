"""Attention of test-time training (EAGLE-3, arXiv 2503.01840): one causal block and some diagonals.

At step i, position t sees the keys of step 0 at positions 0 … t of its document, or the newest `window` of these, and its own
keys of the steps 1 … i. As one softmax this has scores of S x (S + i). The back ends are equal to rounding: `eager` computes
these scores; `sdpa` and `flex` are torch's own with a mask over the keys of all steps; `auto` is the fused kernel below, which
computes no diagonal as a matrix, where the device has one and no window leaves something out, and otherwise sdpa.

The fused kernel takes the causal block by torch's own kernel, and merges each diagonal in by log-sum-exp:

    w = softmax([lse_causal, s_1, …, s_i]),  s_j = q·k_j/√d,  o = w_0·o_causal + Σ_j w_j·v_j

For the gradients of the causal part, the kernel's own backward gets the *merged* output and log-sum-exp: it recomputes
its probabilities as exp(q·k - lse), which then are those of the whole softmax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.attention import check_flex, get_block_mask_factory, get_flex_attention
from draftworks.drafts.documents import Documents
from draftworks.drafts.flash_kernels import CAUSAL_KERNELS, PACKED_KERNELS, Attended, ByDocument, CausalKernel
from draftworks.drafts.layers import without_compile


def fused_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents
) -> Tensor:
    """Return `ttt_attention` by the fused kernel, without windows, on devices where `fused_kernel_works`.

    A diagonal belongs to one position, so only the causal block needs the documents.
    """
    kernel = _choose_kernel(query.device, query.dtype, query.shape[-1], documents)
    return _FusedTttAttention.apply(kernel, query, len(keys), *keys, *values)


def _choose_kernel(device: torch.device, dtype: torch.dtype, head_size: int, documents: Documents) -> CausalKernel:
    kernel = CAUSAL_KERNELS[device.type]
    if not documents.has_several:
        return kernel
    if packed_kernel_works(device, dtype, head_size):
        return PACKED_KERNELS[device.type](documents)
    return ByDocument(kernel, documents)


@functools.cache
def fused_kernel_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether the fused kernel gives the eager path's output and gradients on this device.

    Tried once, on a small row of one document and on one of several, where the kernel gets strided parts.
    """
    if device.type not in CAUSAL_KERNELS:
        return False
    kernel = CAUSAL_KERNELS[device.type]
    one, several = (Documents.from_lengths(lengths, device) for lengths in ((7,), (3, 2, 2)))
    tried = ((kernel, one), (ByDocument(kernel, several), several))
    return all(_works(kernel, row, dtype, head_size) for kernel, row in tried)


@functools.cache
def packed_kernel_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return the same for a kernel that takes a whole packed row at once."""
    if device.type not in PACKED_KERNELS:
        return False
    documents = Documents.from_lengths((3, 2, 2), device)
    return _works(PACKED_KERNELS[device.type](documents), documents, dtype, head_size)


def _works(kernel: CausalKernel, documents: Documents, dtype: torch.dtype, head_size: int) -> bool:
    try:
        return _fused_equals_eager(kernel, documents, dtype, head_size)
    except (AttributeError, RuntimeError, TypeError):  # an operator that is missing, or has other arguments
        return False


@torch.enable_grad()
def _fused_equals_eager(kernel: CausalKernel, documents: Documents, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether output and gradients agree at step 1."""

    def fused(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], _: Documents) -> Tensor:
        return _FusedTttAttention.apply(kernel, query, len(keys), *keys, *values)

    tolerance = 0.05 if dtype.itemsize == 2 else 1e-4
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        values = torch.randn(1, heads, sum(documents.lengths), head_size, generator=generator)
        return values.to(documents.begins.device, dtype)

    inputs, seed = [draw(heads) for heads in (4, 2, 4, 2, 4)], draw(4)
    results = []
    for attend in (fused, eager_ttt_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attend(leaves[0], leaves[1:3], leaves[3:], documents)
        # The gradient of a product, not `grad_outputs`, whose check imports sympy.
        results.append([output, *torch.autograd.grad((output * seed).sum(), leaves)])
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*results, strict=True))


class _FusedTttAttention(torch.autograd.Function):
    """`ttt_attention` by a fused kernel; its arguments are flat because autograd sees only top-level tensors."""

    @staticmethod
    def forward(ctx, kernel: CausalKernel, query: Tensor, steps: int, *keys_and_values: Tensor) -> Tensor:
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        causal, lse, rest = kernel.forward(query, keys[0], values[0])  # (B, heads, S, D), (B, heads, S)
        wide, scale = lse.dtype, query.shape[-1] ** -0.5
        stacked = torch.stack([lse, *(_dots(query, key, wide).mul_(scale) for key in keys[1:])])  # (i + 1, B, heads, S)
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
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, output, lse, weights, *keys_and_values = ctx.saved_tensors
        steps = len(keys_and_values) // 2
        keys, values = keys_and_values[:steps], keys_and_values[steps:]
        merged = Attended(output, lse, ctx.rest)
        d_query, d_key, d_value = ctx.kernel.backward(grad, query, keys[0], values[0], merged)
        d_keys, d_values = [d_key], [d_value]
        wide, scale = lse.dtype, query.shape[-1] ** -0.5
        inner = _dots(grad, output, wide) if steps > 1 else None
        for weight, key, value in zip(weights[1:], keys[1:], values[1:], strict=True):
            assert inner is not None
            d_score = _dots(grad, value, wide).sub_(inner).mul_(weight).mul_(scale).to(query.dtype).unsqueeze(-1)
            d_query.addcmul_(d_score, key)
            d_keys.append(d_score * query)
            d_values.append(weight.to(query.dtype).unsqueeze(-1) * grad)
        return (None, d_query, None, *d_keys, *d_values)


def _dots(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dot products by position, (…, S, D) · (…, S, D) to (…, S), with products and sum in `dtype`."""
    return (x.to(dtype) * y.to(dtype)).sum(-1)


_MASKS_KEPT = 32
"""Cached masks of flex: one per step of the unroll and recent lengths of documents."""


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Return (B, kv_heads, S, D) repeated to (B, heads, S, D) for the groups of query heads; S is outermost in memory."""
    groups = heads // x.shape[1]
    by_row = x.transpose(1, 2).unsqueeze(3)
    return by_row.expand(-1, -1, -1, groups, -1).flatten(2, 3).transpose(1, 2)


def eager_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None
) -> Tensor:
    """Return `ttt_attention` by explicit scores, O(S²) memory, on any device; the reference of the other back ends."""
    length, heads = query.shape[2], query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    causal = query @ per_query_head(keys[0], heads).transpose(-1, -2)  # (B, heads, S, S)
    columns = [causal.masked_fill(~_seen_mask(documents, 1, window), float("-inf"))]
    columns += [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat(columns, dim=-1).to(wide) * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
    output = weights[..., :length] @ per_query_head(values[0], heads)
    for step, value in enumerate(values[1:]):
        output = output + weights[..., length + step, None] * value
    return output


def sdpa_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None
) -> Tensor:
    """Return `ttt_attention` by torch's scaled_dot_product_attention with a mask of (S, steps · S)."""
    seen, heads = _seen_mask(documents, len(keys), window), query.shape[1]
    return F.scaled_dot_product_attention(query, _join_steps(keys, heads), _join_steps(values, heads), attn_mask=seen)


def flex_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None
) -> Tensor:
    """Return `ttt_attention` by torch's flex attention, which skips the tiles that the mask leaves out."""
    mask, heads = _flex_mask(documents.lengths, len(keys), window, query.device), query.shape[1]
    attention = get_flex_attention(query.device.type)
    return attention(query, _join_steps(keys, heads), _join_steps(values, heads), block_mask=mask)


def _join_steps(steps: Sequence[Tensor], heads: int) -> Tensor:
    """Return keys or values of all steps one after another, (B, heads, steps · S, D)."""
    return torch.cat([per_query_head(steps[0], heads), *steps[1:]], dim=2)


def _seen_mask(documents: Documents, steps: int, window: int | None) -> Tensor:
    """Return the mask (S, steps · S) bool.

    A position sees step 0 of its document up to itself, or the window that ends there, and itself at later steps.
    """
    document_ids = documents.document_ids
    causal = (document_ids[:, None] == document_ids).tril()
    if window is not None:
        causal = causal.triu(1 - window)
    own = torch.eye(len(document_ids), dtype=torch.bool, device=document_ids.device)
    return torch.cat([causal, *[own] * (steps - 1)], dim=1)


@functools.lru_cache(maxsize=_MASKS_KEPT)
def _flex_mask(lengths: tuple[int, ...], steps: int, window: int | None, device: torch.device) -> Any:
    length, begins = sum(lengths), Documents.from_lengths(lengths, device).begins
    key = torch.arange(steps * length, device=device)
    if window is not None:
        begins = torch.maximum(begins, key[:length] + 1 - window)
    # The position that a key of a later step belongs to; -1 at step 0. A tensor, because flex would be compiled again for
    # every length if it were computed from numbers.
    own = torch.where(key < length, -1, key % length)

    def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv <= q) & (kv >= begins[q])) | (own[kv] == q)

    return get_block_mask_factory(device.type)(seen, None, None, length, steps * length, device=device)


TttAttention = Callable[..., Tensor]
"""A function of query, keys, values and documents; those that support windows take one after these."""


@without_compile  # the fused kernel's private operators, and flex, which is compiled by itself
def ttt_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    documents: Documents,
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Return the attention of step i = len(keys) - 1.

    Args:
        query: (B, heads, S, D).
        keys, values: of the steps 0 … i. Those of step 0 are (B, kv_heads, S, D), heads a multiple of kv_heads; those
            of later steps are (B, heads, S, D) by `per_query_head`, because products by position need plain memory.
        documents: positions see their own document only.
        backend: auto, eager, sdpa or flex.
        window: number of positions of step 0 that a position sees, its own included; None for all.

    Returns:
        (B, heads, S, D), dtype of `query`.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """
    bounds = () if window is None or window >= documents.longest else (window,)
    return _choose_backend(query, backend, bool(bounds))(query, keys, values, documents, *bounds)


def _choose_backend(query: Tensor, backend: str, windowed: bool) -> TttAttention:
    if backend == "eager":
        return eager_ttt_attention
    if backend == "flex":
        check_flex("eagle3", query.device)
        return flex_ttt_attention
    if backend == "auto" and not windowed and fused_kernel_works(query.device, query.dtype, query.shape[-1]):
        return fused_ttt_attention
    return sdpa_ttt_attention
