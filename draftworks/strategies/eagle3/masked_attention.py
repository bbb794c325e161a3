"""`ttt_attention` as one attention over the keys of all steps, by torch's public means: written out, sdpa, flex."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.documents import Documents
from draftworks.drafts.flex import block_mask_on, flex_attention_on

_MASKS_KEPT = 32
"""Of flex: one for each step of the unroll at the lengths of late."""


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat (B, kv_heads, S, D) to (B, heads, S, D), each for its group of query heads; S outermost in memory."""
    groups = heads // x.shape[1]
    by_row = x.transpose(1, 2).unsqueeze(3)
    return by_row.expand(-1, -1, -1, groups, -1).flatten(2, 3).transpose(1, 2)


def eager_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None
) -> Tensor:
    """Explicit scores, O(S²) memory, on any device: what the others are checked against."""
    length, heads = query.shape[2], query.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    causal = query @ per_query_head(keys[0], heads).transpose(-1, -2)
    columns = [causal.masked_fill(~_sees(documents, 1, window), float("-inf"))]
    columns += [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat(columns, dim=-1).to(wide) * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
    output = weights[..., :length] @ per_query_head(values[0], heads)
    for step, value in enumerate(values[1:]):
        output = output + weights[..., length + step, None] * value
    return output


def sdpa_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention with a mask of (S, steps · S)."""
    seen, heads = _sees(documents, len(keys), window), query.shape[1]
    return F.scaled_dot_product_attention(query, _joined(keys, heads), _joined(values, heads), attn_mask=seen)


def flex_ttt_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None
) -> Tensor:
    """torch's flex attention, which skips the tiles that the mask leaves out."""
    mask, heads = _flex_mask(documents.lengths, len(keys), window, query.device), query.shape[1]
    attention = flex_attention_on(query.device.type)
    return attention(query, _joined(keys, heads), _joined(values, heads), block_mask=mask)


def _joined(steps: Sequence[Tensor], heads: int) -> Tensor:
    """Keys or values of all steps one after another, (B, heads, steps · S, D)."""
    return torch.cat([per_query_head(steps[0], heads), *steps[1:]], dim=2)


def _sees(documents: Documents, steps: int, window: int | None) -> Tensor:
    """(S, steps · S) bool: a row sees step 0 of its document up to itself, or the window that ends there, and itself in
    the others."""
    numbers = documents.numbers
    causal = (numbers[:, None] == numbers).tril()
    if window is not None:
        causal = causal.triu(1 - window)
    own = torch.eye(len(numbers), dtype=torch.bool, device=numbers.device)
    return torch.cat([causal, *[own] * (steps - 1)], dim=1)


@functools.lru_cache(maxsize=_MASKS_KEPT)
def _flex_mask(lengths: tuple[int, ...], steps: int, window: int | None, device: torch.device) -> Any:
    length, begins = sum(lengths), Documents.after_each_other(lengths, device).begins
    key = torch.arange(steps * length, device=device)
    if window is not None:
        begins = torch.maximum(begins, key[:length] + 1 - window)
    # Whose own a key is; -1 for those of step 0. As a tensor: by numbers, flex would be compiled anew for every length.
    own = torch.where(key < length, -1, key % length)

    def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv <= q) & (kv >= begins[q])) | (own[kv] == q)

    return block_mask_on(device.type)(seen, None, None, length, steps * length, device=device)
