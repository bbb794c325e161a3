"""Attention of block drafts (DFlash, arXiv 2602.06036): every block sees the target's context before its anchor, and itself.

A token of the block at anchor a sees the context at positions below a, and all tokens of its own block. In a layer with a
sliding window of w tokens, position p sees p - w + 1 … p only, so attention within the block is causal there.

Three back ends give the same numbers to rounding: `eager` writes the mask out, `sdpa` goes through the blocks in groups
and cuts the context to what a group can see, `flex` compiles the mask. Flex has been compared on a CPU only, where it has
no gradients, so it is taken only when it is asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks
from draftworks.drafts.flex import check_flex, flex_attention_on

GROUP_TOKENS = {"cpu": 128, "cuda": 4096}
"""Query tokens of one group of the `sdpa` back end, by type of device."""


class KeyValue(NamedTuple):
    """Keys and values, (B, kv_heads, n, D) each."""

    key: Tensor
    value: Tensor


class BlockAttention:
    """Attention of all blocks of a batch: the same blocks in every layer, so a mask is made once for each window.

    Args:
        length: S, positions of the context.
        backend: eager, sdpa, flex, or auto, which is sdpa.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """

    def __init__(self, blocks: Blocks, length: int, backend: str = "auto") -> None:
        if backend == "flex":
            check_flex("dflash", blocks.anchors.device)
        self.blocks = blocks
        self._length = length
        self._attend = {"eager": self._eager, "flex": self._flex}.get(backend, self._sdpa)
        self._flex_masks: dict[int | None, Any] = {}

    def __call__(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        """Attention of one layer.

        Args:
            query: (B, heads, A · size, D).
            context: of the positions 0 … S-1.
            own: of the blocks' tokens; heads a multiple of kv_heads.
            window: of the layer, in tokens; None = none.

        Returns:
            (B, heads, A · size, D).
        """
        return self._attend(query, context, own, window)

    def _eager(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        groups = query.shape[1] // own.key.shape[1]
        key = torch.cat([context.key, own.key], dim=2).repeat_interleave(groups, dim=1)
        value = torch.cat([context.value, own.value], dim=2).repeat_interleave(groups, dim=1)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5
        seen = _sees(self.blocks, self._length, window)
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(query.dtype) @ value

    def _sdpa(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        blocks = self.blocks
        at_once = max(1, GROUP_TOKENS.get(query.device.type, GROUP_TOKENS["cuda"]) // blocks.size)
        ends = blocks.anchors.amax(0).tolist()
        outputs = []
        for start in range(0, blocks.count, at_once):
            group = blocks.part(start, start + at_once)
            mine = slice(start * blocks.size, (start + group.count) * blocks.size)
            reach = max(ends[start : start + at_once])
            key = torch.cat([context.key[:, :, :reach], own.key[:, :, mine]], dim=2)
            value = torch.cat([context.value[:, :, :reach], own.value[:, :, mine]], dim=2)
            seen = _sees(group, reach, window)
            part = F.scaled_dot_product_attention(query[:, :, mine], key, value, attn_mask=seen, enable_gqa=True)
            outputs.append(part)
        return torch.cat(outputs, dim=2)

    def _flex(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        if window not in self._flex_masks:
            self._flex_masks[window] = _flex_mask(self.blocks, self._length, window)
        key = torch.cat([context.key, own.key], dim=2)
        value = torch.cat([context.value, own.value], dim=2)
        attention = flex_attention_on(query.device.type)
        return attention(query, key, value, block_mask=self._flex_masks[window], enable_gqa=True)


def _flex_mask(blocks: Blocks, length: int, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    size, anchors = blocks.size, blocks.anchors

    def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, position = anchors[batch, q // size], anchors[batch, q // size] + q % size
        ours = (kv - length) // size == q // size
        where = torch.where(kv < length, kv, anchor + (kv - length) % size)
        visible = torch.where(kv < length, kv < anchor, ours)
        return visible if window is None else visible & (where <= position) & (where > position - window)

    tokens = blocks.count * size
    return create_block_mask(seen, anchors.shape[0], None, tokens, length + tokens, device=anchors.device)


def _sees(blocks: Blocks, length: int, window: int | None) -> Tensor:
    """(B, 1, A · size, length + A · size) bool: which keys, of the context and then of the blocks, a token sees."""
    return torch.cat([_sees_context(blocks, length, window), _sees_blocks(blocks, window)], dim=-1)[:, None]


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
