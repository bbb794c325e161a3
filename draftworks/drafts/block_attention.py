"""Attention of block drafts (DFlash, arXiv 2602.06036): every block sees the target's context before its anchor, and itself.

A token of the block at anchor a sees the context at positions below a, and all tokens of its own block. In a layer with a
sliding window of w tokens, position p sees p - w + 1 … p only, so attention within the block is causal there.

Three back ends give the same numbers to rounding: `eager` writes the mask out, `sdpa` goes through the blocks in groups
and cuts the context to what a group can see, `flex` compiles the mask (CUDA).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks

GROUP_TOKENS = 128
"""Query tokens of one group of the `sdpa` back end."""


class KeyValue(NamedTuple):
    """Keys and values, (B, kv_heads, n, D) each."""

    key: Tensor
    value: Tensor


def block_attention(
    query: Tensor, context: KeyValue, own: KeyValue, blocks: Blocks, window: int | None, backend: str
) -> Tensor:
    """Attention of all blocks.

    Args:
        query: (B, heads, A · size, D).
        context: of the positions 0 … S-1.
        own: of the blocks' tokens; heads a multiple of kv_heads.
        window: of the layer, in tokens; None = none.
        backend: eager, sdpa, flex, or auto.

    Returns:
        (B, heads, A · size, D).
    """
    return _BACKENDS[chosen_backend(backend, query.device)](query, context, own, blocks, window)


def chosen_backend(backend: str, device: torch.device) -> str:
    if backend == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    return backend


def _eager(query: Tensor, context: KeyValue, own: KeyValue, blocks: Blocks, window: int | None) -> Tensor:
    groups = query.shape[1] // own.key.shape[1]
    key = torch.cat([context.key, own.key], dim=2).repeat_interleave(groups, dim=1)
    value = torch.cat([context.value, own.value], dim=2).repeat_interleave(groups, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5
    seen = torch.cat([_sees_context(blocks, context.key.shape[2], window), _sees_blocks(blocks, window)], dim=-1)
    return scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).to(query.dtype) @ value


def _sdpa(query: Tensor, context: KeyValue, own: KeyValue, blocks: Blocks, window: int | None) -> Tensor:
    at_once = max(1, GROUP_TOKENS // blocks.size)
    ends = blocks.anchors.amax(0).tolist()
    outputs = []
    for start in range(0, blocks.count, at_once):
        group = blocks.part(start, start + at_once)
        mine = slice(start * blocks.size, (start + group.count) * blocks.size)
        reach = max(ends[start : start + at_once])
        key = torch.cat([context.key[:, :, :reach], own.key[:, :, mine]], dim=2)
        value = torch.cat([context.value[:, :, :reach], own.value[:, :, mine]], dim=2)
        seen = torch.cat([_sees_context(group, reach, window), _sees_blocks(group, window)], dim=-1)[:, None]
        outputs.append(F.scaled_dot_product_attention(query[:, :, mine], key, value, attn_mask=seen, enable_gqa=True))
    return torch.cat(outputs, dim=2)


def _flex(query: Tensor, context: KeyValue, own: KeyValue, blocks: Blocks, window: int | None) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    length, size, anchors = context.key.shape[2], blocks.size, blocks.anchors

    def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, position = anchors[batch, q // size], anchors[batch, q // size] + q % size
        ours = (kv - length) // size == q // size
        where = torch.where(kv < length, kv, anchor + (kv - length) % size)
        visible = torch.where(kv < length, kv < anchor, ours)
        return visible if window is None else visible & (where <= position) & (where > position - window)

    device = query.device
    shape = (query.shape[0], None, query.shape[2], length + query.shape[2])
    mask = create_block_mask(seen, *shape, device=device)
    key = torch.cat([context.key, own.key], dim=2)
    value = torch.cat([context.value, own.value], dim=2)
    return _flex_attention(device.type)(query, key, value, block_mask=mask, enable_gqa=True)


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Tensor]:
    """Compiled where that is what makes it fast; on CPU it runs as it is, without gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


_BACKENDS = {"eager": _eager, "sdpa": _sdpa, "flex": _flex}


def _sees_context(blocks: Blocks, length: int, window: int | None) -> Tensor:
    """(B, A · size, length) bool."""
    positions = torch.arange(length, device=blocks.anchors.device)
    anchors = blocks.anchors.repeat_interleave(blocks.size, dim=1)[..., None]
    visible = positions < anchors
    return visible if window is None else visible & (positions > blocks.positions[..., None] - window)


def _sees_blocks(blocks: Blocks, window: int | None) -> Tensor:
    """(B, A · size, A · size) bool, the same for every sample."""
    token = torch.arange(blocks.count * blocks.size, device=blocks.anchors.device)
    visible = token[:, None] // blocks.size == token // blocks.size
    if window is not None:
        behind = token[:, None] - token
        visible = visible & (behind >= 0) & (behind < window)
    return visible.expand(blocks.anchors.shape[0], -1, -1)
