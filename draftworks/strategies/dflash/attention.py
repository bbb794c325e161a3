"""Attention of block drafts (DFlash, arXiv 2602.06036): every block sees the target's context before its anchor, and itself.

A token of the block at anchor a sees the context of its document at positions below a, and all tokens of its own block. In a
layer with a sliding window of w tokens, position p sees p - w + 1 … p only, so attention within the block is causal there.

Three back ends give the same numbers to rounding: `eager` writes the mask out, `sdpa` goes through the blocks in groups
and cuts the context to what a group can see, `flex` compiles the mask and skips what it leaves out. `auto` is flex on a GPU
that has shown that it can (draftworks.drafts.flex), because no other kernel of torch takes such a mask without reading all of
it; and sdpa elsewhere, and for a few tokens. On a GPU none of this has been measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks
from draftworks.drafts.flex import check_flex, flex_attention_on, flex_works
from draftworks.strategies.dflash.attention_tiles import TILE, SeenKeys

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
        backend: eager, sdpa, flex, or auto; see the top of this module.
        strategy: whose they are, for the error.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """

    def __init__(self, blocks: Blocks, length: int, backend: str = "auto", strategy: str = "dflash") -> None:
        if backend == "flex":
            check_flex(strategy, blocks.anchors.device)
        self.blocks = blocks
        self._length = length
        self._backend = backend
        self._flex_masks: dict[int | None, Any] = {}
        self._groups: list[_Group] | None = None

    @torch.compiler.disable  # groups are another number in every batch; flex is compiled by itself
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
        backend = self._best(query) if self._backend == "auto" else self._backend
        attend = {"eager": self._eager, "sdpa": self._sdpa, "flex": self._flex}[backend]
        return attend(query, context, own, window)

    def _best(self, query: Tensor) -> str:
        enough = query.shape[2] >= TILE
        return "flex" if enough and flex_works(query.device, query.dtype, query.shape[-1]) else "sdpa"

    def _eager(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        groups = query.shape[1] // own.key.shape[1]
        key = torch.cat([context.key, own.key], dim=2).repeat_interleave(groups, dim=1)
        value = torch.cat([context.value, own.value], dim=2).repeat_interleave(groups, dim=1)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5
        seen = _sees(self.blocks, slice(0, self._length), window)
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(query.dtype) @ value

    def _sdpa(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        if self._groups is None:
            self._groups = _groups(self.blocks, query.device)
        groups = self._groups
        spans = tuple(span for group in groups for span in (group.reach, group.tokens))
        keys, values = _Joined.apply(context.key, own.key, spans), _Joined.apply(context.value, own.value, spans)
        queries = query.split([group.tokens.stop - group.tokens.start for group in groups], dim=2)
        outputs = []
        for group, q, key, value in zip(groups, queries, keys, values, strict=True):
            seen = _sees(group.blocks, group.reach, window)
            if q.device.type == "cuda":
                # Of its kernels that take a mask, none takes fewer heads of keys than of queries.
                times = q.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
            fewer = key.shape[1] != q.shape[1]
            outputs.append(F.scaled_dot_product_attention(q, key, value, attn_mask=seen, enable_gqa=fewer))
        return torch.cat(outputs, dim=2)

    def _flex(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        if window not in self._flex_masks:
            self._flex_masks[window] = SeenKeys.of(self.blocks, self._length, window).block_mask()
        key = torch.cat([context.key, own.key], dim=2)
        value = torch.cat([context.value, own.value], dim=2)
        attention = flex_attention_on(query.device.type)
        return attention(query, key, value, block_mask=self._flex_masks[window], enable_gqa=True)


class _Group(NamedTuple):
    """Blocks that are attended to at once: where their tokens are among all of them, and what context these can see."""

    blocks: Blocks
    tokens: slice
    reach: slice


def _groups(blocks: Blocks, device: torch.device) -> list[_Group]:
    most = max(1, GROUP_TOKENS.get(device.type, GROUP_TOKENS["cuda"]) // blocks.size)
    begins, ends = blocks.begins.amin(0).tolist(), blocks.anchors.amax(0).tolist()
    starts = _group_starts(begins, most)
    return [
        _Group(
            blocks.part(start, stop),
            slice(start * blocks.size, stop * blocks.size),
            slice(min(begins[start:stop]), max(ends[start:stop])),
        )
        for start, stop in zip(starts, [*starts[1:], blocks.count])
    ]


def _group_starts(begins: list[int], most: int) -> list[int]:
    """Where groups of at most so many blocks begin. Half a group ends with its document: another one's blocks would see none
    of its context, nor it of theirs."""
    starts = [0]
    for block in range(1, len(begins)):
        count, elsewhere = block - starts[-1], begins[block] != begins[block - 1]
        if count == most or (elsewhere and 2 * count >= most):
            starts.append(block)
    return starts


class _Joined(torch.autograd.Function):
    """Of context and own keys (or values), what every group sees of them, one after the other. The gradients of all groups
    are added up in one place; slices would each make a whole context of zeros for theirs."""

    @staticmethod
    def forward(ctx, context: Tensor, own: Tensor, spans: tuple[slice, ...]):
        ctx.spans, ctx.length = spans, context.shape[2]
        return tuple(
            torch.cat([context[:, :, reach], own[:, :, tokens]], dim=2)
            for reach, tokens in zip(spans[::2], spans[1::2], strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        batch, heads, _, width = grads[0].shape
        reaches, tokens = ctx.spans[::2], ctx.spans[1::2]
        d_context = grads[0].new_zeros(batch, heads, ctx.length, width)
        for grad, reach in zip(grads, reaches, strict=True):
            d_context[:, :, reach] += grad[:, :, : reach.stop - reach.start]
        d_own = [
            grad[:, :, grad.shape[2] - (mine.stop - mine.start) :] for grad, mine in zip(grads, tokens, strict=True)
        ]
        return d_context, torch.cat(d_own, dim=2), None


def _sees(blocks: Blocks, context: slice, window: int | None) -> Tensor:
    """(B, 1, A · size, n + A · size) bool: which keys, of n places of the context and then of the blocks, a token sees."""
    return torch.cat([_sees_context(blocks, context, window), _sees_blocks(blocks, window)], dim=-1)[:, None]


def _sees_context(blocks: Blocks, context: slice, window: int | None) -> Tensor:
    """(B, A · size, n) bool."""
    places = torch.arange(context.start, context.stop, device=blocks.anchors.device)
    visible = (places < blocks.anchors[..., None]) & (places >= blocks.begins[..., None])
    visible = visible.repeat_interleave(blocks.size, dim=1)
    return visible if window is None else visible & (places > blocks.places[..., None] - window)


def _sees_blocks(blocks: Blocks, window: int | None) -> Tensor:
    """(B, A · size, A · size) bool, the same for every sample."""
    token = torch.arange(blocks.count * blocks.size, device=blocks.anchors.device)
    visible = token[:, None] // blocks.size == token // blocks.size
    if window is not None:
        behind = token[:, None] - token
        visible = visible & (behind >= 0) & (behind < window)
    return visible.expand(blocks.anchors.shape[0], -1, -1)
