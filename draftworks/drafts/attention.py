"""Attention of draft tokens, each of which sees two intervals of keys: some of the context, and some of the draft tokens.

So it is for the blocks of DFlash (`Blocks.make_seen_keys`) and for the chains of P-EAGLE (`Chains.make_seen_keys`): `SeenKeys` says it in four bounds
for each token, and everything else here follows from these.

Three back ends give the same numbers to rounding: `eager` writes the mask out; `sdpa` goes through the tokens in groups, cuts the
keys to what a group sees, and makes masks again for the gradients instead of keeping them; `flex` compiles the mask and
skips what it leaves out. `auto` is flex on a GPU that has shown that it can (draftworks.drafts.flex), because no other kernel of
torch takes such a mask without reading all of it; and sdpa elsewhere, and for a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.flash_kernels import Attended, choose_masked_kernel
from draftworks.drafts.flex import check_flex, flex_works, get_flex_attention

GROUP_TOKENS = {"cpu": 128, "cuda": 4096}
"""Query tokens of one group of the `sdpa` back end, by type of device."""
TILE = 128
"""Queries, and keys, of a tile: what flex's kernels take by default."""


class KeyValue(NamedTuple):
    """Keys and values, (B, kv_heads, n, D) each."""

    key: Tensor
    value: Tensor

    def select(self, span: slice) -> KeyValue:
        return KeyValue(self.key[:, :, span], self.value[:, :, span])

    def concat(self, others: KeyValue) -> KeyValue:
        return KeyValue(*(torch.cat(both, dim=2) for both in zip(self, others, strict=True)))


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """Which keys the n draft tokens see: the context in [begin, end), and of the draft tokens those in [own_begin, own_end).

    Attributes:
        begin, end, own_begin, own_end: (B, n) int64. Without a window `begin` is where a token's document begins, and a token
            follows its `end` as many positions later as it follows its `own_begin`.
        context: S, keys of the context.
    """

    begin: Tensor
    end: Tensor
    own_begin: Tensor
    own_end: Tensor
    context: int

    def with_window(self, window: int | None) -> SeenKeys:
        """Less what is not among the newest `window` positions, a token's own included."""
        if window is None:
            return self
        token = torch.arange(self.begin.shape[1], device=self.begin.device)
        positions = self.end + token - self.own_begin
        return replace(
            self,
            begin=torch.maximum(self.begin, positions - window + 1),
            own_begin=torch.maximum(self.own_begin, token - window + 1),
            own_end=torch.minimum(self.own_end, token + 1),
        )

    def make_mask(self, group: Group | None = None) -> Tensor:
        """(B, 1, n, S + n) bool, which keys a token sees; or of a group, (B, 1, tokens, keys of context + own)."""
        tokens, context, own = group or Group(slice(None), slice(0, self.context), slice(0, self.begin.shape[1]))
        in_context = _between(context, self.begin[:, tokens], self.end[:, tokens])
        return torch.cat([in_context, _between(own, self.own_begin[:, tokens], self.own_end[:, tokens])], -1)[:, None]

    def split_tokens(self, most: int) -> list[slice]:
        """The tokens in pieces of one document each, as even as can be and none of more than `most`."""
        pieces, start = [], 0
        for count in self.begin.amin(0).unique_consecutive(return_counts=True)[1].tolist():
            size = -(-count // -(-count // most))
            pieces += [slice(at, min(at + size, start + count)) for at in range(start, start + count, size)]
            start += count
        return pieces

    def make_groups(self, pieces: list[slice]) -> list[Group]:
        """With what each piece of the tokens sees."""
        bounds = (self.begin.amin(0), self.end.amax(0), self.own_begin.amin(0), self.own_end.amax(0))
        begin, end, own_begin, own_end = torch.stack(bounds).tolist()
        return [Group(at, _span(begin[at], end[at]), _span(own_begin[at], own_end[at])) for at in pieces]

    def make_block_mask(self) -> Any:
        """flex's `BlockMask` of it, the same for all heads. It is made tile by tile: nothing as large as queries times keys is
        ever held."""
        from torch.nn.attention.flex_attention import BlockMask

        begin, end = self.begin, self.end
        own_begin, own_end = self.own_begin + self.context, self.own_end + self.context

        def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            in_context = (kv >= begin[batch, q]) & (kv < end[batch, q])
            return in_context | ((kv >= own_begin[batch, q]) & (kv < own_end[batch, q]))

        count = begin.shape[1]
        first = torch.arange(0, self.context + count, TILE, device=begin.device)
        touched = _touched(first, begin, end) | _touched(first, own_begin, own_end)
        whole = _by_tile(begin, count + self.context).amax(-1, True) <= first
        whole = whole & (_by_tile(end, 0).amin(-1, True) >= first + TILE)
        lists = (*_listed(touched & ~whole), *_listed(whole))
        lengths = (count, self.context + count)
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=lengths)


class Group(NamedTuple):
    """Tokens that are attended to at once, and the keys, of the context and of all tokens, among which are all that they see."""

    tokens: slice
    context: slice
    own: slice


def _span(begins: list[int], ends: list[int]) -> slice:
    end = max(ends)
    return slice(min(*begins, end), end)


def _between(keys: slice, begin: Tensor, end: Tensor) -> Tensor:
    """(B, n, keys) bool."""
    key = torch.arange(keys.start, keys.stop, device=begin.device)
    return (key >= begin[..., None]) & (key < end[..., None])


def _touched(first: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """(B, tiles of queries, tiles of keys) bool: all tiles in which anything of [begin, end) is, and maybe some others."""
    lowest = _by_tile(begin, torch.iinfo(begin.dtype).max).amin(-1, True)
    return (lowest < first + TILE) & (_by_tile(end, 0).amax(-1, True) > first)


def _by_tile(bounds: Tensor, fill: int) -> Tensor:
    """(B, n) to (B, tiles, TILE)."""
    return F.pad(bounds, (0, -bounds.shape[1] % TILE), value=fill).unflatten(1, (-1, TILE))


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """As flex wants them, for each tile of queries: how many tiles of keys, and which, those first; int32."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


class DraftAttention:
    """Attention of the draft tokens of a batch: the same in every layer, so a mask is made once for each window.

    Args:
        backend: eager, sdpa, flex, or auto; see the top of this module.
        strategy: whose they are, for the error.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """

    def __init__(self, seen: SeenKeys, backend: str = "auto", strategy: str = "dflash") -> None:
        if backend == "flex":
            check_flex(strategy, seen.begin.device)
        self._seen = seen
        self._backend = backend
        self._pieces: list[slice] = []
        self._groups: dict[int | None, list[Group]] = {}
        self._flex_masks: dict[int | None, Any] = {}

    @torch.compiler.disable  # groups are other ones in every batch; flex is compiled by itself
    def __call__(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None = None) -> Tensor:
        """Attention of one layer.

        Args:
            query: (B, heads, n, D).
            context: of the S positions.
            own: of the n tokens; heads a multiple of kv_heads.
            window: of the layer, in tokens; None = none.

        Returns:
            (B, heads, n, D).
        """
        if not query.shape[2]:
            return query
        backend = self._choose(query) if self._backend == "auto" else self._backend
        attend = {"eager": self._eager, "sdpa": self._sdpa, "flex": self._flex}[backend]
        return attend(query, context, own, window)

    def _choose(self, query: Tensor) -> str:
        enough = query.shape[2] >= TILE
        return "flex" if enough and flex_works(query.device, query.dtype, query.shape[-1]) else "sdpa"

    def _eager(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        groups = query.shape[1] // own.key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in context.concat(own))
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5
        seen = self._seen.with_window(window).make_mask()
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(query.dtype) @ value

    def _sdpa(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        seen = self._seen.with_window(window)
        if window not in self._groups:
            # Pieces are of whole documents only where no window moves the beginnings.
            self._pieces = self._pieces or self._seen.split_tokens(
                GROUP_TOKENS.get(query.device.type, GROUP_TOKENS["cuda"])
            )
            self._groups[window] = seen.make_groups(self._pieces)
        return _InGroups.apply(seen, self._groups[window], query, *context, *own)

    def _flex(self, query: Tensor, context: KeyValue, own: KeyValue, window: int | None) -> Tensor:
        if window not in self._flex_masks:
            self._flex_masks[window] = self._seen.with_window(window).make_block_mask()
        key, value = context.concat(own)
        attention = get_flex_attention(query.device.type)
        return attention(query, key, value, block_mask=self._flex_masks[window], enable_gqa=True)


class _InGroups(torch.autograd.Function):
    """Attention group by group. Neither masks nor scores, nor the keys of a group, are kept for the gradients."""

    @staticmethod
    def forward(ctx, seen: SeenKeys, groups: list[Group], query: Tensor, *keys_and_values: Tensor) -> Tensor:
        kernel = choose_masked_kernel(query.device.type, query.dtype, query.shape[-1])
        output, sums = torch.empty_like(query), []
        for group in groups:
            attended = kernel.forward(*_part(group, query, *keys_and_values), seen.make_mask(group))
            output[:, :, group.tokens] = attended.output
            sums.append(attended.lse)
        ctx.save_for_backward(query, *keys_and_values, output, *sums)
        ctx.seen, ctx.groups, ctx.kernel = seen, groups, kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, *keys_and_values, output = ctx.saved_tensors[:6]
        gradients = [torch.zeros_like(x) for x in (query, *keys_and_values)]
        for group, lse in zip(ctx.groups, ctx.saved_tensors[6:], strict=True):
            attended = Attended(output[:, :, group.tokens], lse)
            inputs = _part(group, query, *keys_and_values)
            d_query, *both = ctx.kernel.backward(grad[:, :, group.tokens], *inputs, ctx.seen.make_mask(group), attended)
            gradients[0][:, :, group.tokens] = d_query
            reach = group.context.stop - group.context.start
            for d_joined, d_context, d_own in zip(both, gradients[1:3], gradients[3:], strict=True):
                d_context[:, :, group.context] += d_joined[:, :, :reach]
                d_own[:, :, group.own] += d_joined[:, :, reach:]
        return None, None, *gradients


def _part(group: Group, query: Tensor, *keys_and_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a group; keys and values are of the context, then the tokens' own."""
    context, own = KeyValue(*keys_and_values[:2]), KeyValue(*keys_and_values[2:])
    return query[:, :, group.tokens], *context.select(group.context).concat(own.select(group.own))
