"""Attention of draft tokens that see one interval of context keys and one interval of draft-token keys each.

Used by the blocks of DFlash (`Blocks.make_seen_keys`) and the chains of P-EAGLE (`Chains.make_seen_keys`): `SeenKeys`
holds the four bounds of each draft token, and every back end derives its mask from them.

Three back ends give the same numbers to rounding. `eager` writes the mask out. `sdpa` processes the tokens in groups,
restricts the keys to what a group sees, and keeps masks for all layers and for the gradients while they are small.
`flex` compiles the mask and skips the tiles it leaves out. `auto` is flex on a GPU where a probe of it succeeded,
because no other kernel of torch takes such a mask without reading all of it; elsewhere, and
for fewer tokens than a tile, it is sdpa.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.flash_kernels import Attended, choose_masked_kernel
from draftworks.drafts.layers import compile_for_many_kinds, without_compile
from draftworks.errors import ConfigError

log = logging.getLogger(__name__)

_PROBED = 160
"""Queries of the probe: more than a tile of the kernels, and no multiple of one."""


def get_flex_attention(device_type: str) -> Callable[..., Tensor]:
    """Return flex attention, compiled on a GPU; on a CPU it runs as it is, without gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compile_flex(torch.is_grad_enabled()) if device_type == "cuda" else flex_attention


@functools.cache
def _compile_flex(training: bool) -> Callable[..., Tensor]:
    """Compile one function for training and one for evaluation, whose arguments come in many more kinds."""
    from torch.nn.attention.flex_attention import flex_attention

    def training_attention(*args: Any, **kwargs: Any) -> Tensor:
        return flex_attention(*args, **kwargs)

    def evaluation_attention(*args: Any, **kwargs: Any) -> Tensor:
        return flex_attention(*args, **kwargs)

    return compile_for_many_kinds(training_attention if training else evaluation_attention)


@functools.cache
def get_block_mask_factory(device_type: str) -> Callable[..., Any]:
    """Return torch's `create_block_mask`; compiled on a GPU, as eager it holds every mask element as int64, several
    times.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    return compile_for_many_kinds(create_block_mask) if device_type == "cuda" else create_block_mask


def check_flex(strategy: str, device: torch.device) -> None:
    """Raise ConfigError for gradients on a CPU, where flex attention has none."""
    if device.type == "cpu" and torch.is_grad_enabled():
        raise ConfigError(
            f"{strategy}: attention flex has no gradients on a CPU: set options.attention to sdpa or auto"
        )


@functools.cache
def flex_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `auto` may choose flex attention: on a GPU, in a 2-byte dtype, where a probe equals plain attention.

    Wider dtypes can exceed the shared memory of a multiprocessor. The probe compares output and gradients on a small
    batch row, once; where it fails, a warning says why.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    try:
        problem = None if _flex_equals_sdpa(device, dtype, head_size) else "its results differ from sdpa's"
    except Exception as error:  # no compiler, no Python.h, a head size that it cannot do: torch lets many kinds through
        problem = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
    if problem is not None:
        log.warning(
            "flex attention does not work here for %s and head size %d (%s): using sdpa, which is slower. Triton needs a C "
            "compiler and Python's headers",
            dtype,
            head_size,
            problem,
        )
    return problem is None


@torch.enable_grad()
def _flex_equals_sdpa(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q

    mask = create_block_mask(causal, None, None, _PROBED, _PROBED, device=device.type)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, _PROBED, head_size, generator=generator).to(device, dtype) for heads in (4, 2, 2)]
    groups = [4 // x.shape[1] for x in inputs]
    results = []
    for flex in (True, False):
        query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
        if flex:
            output = get_flex_attention(device.type)(query, key, value, block_mask=mask, enable_gqa=True)
        else:
            every_head = [x.repeat_interleave(times, dim=1) for x, times in zip(leaves, groups, strict=True)]
            output = F.scaled_dot_product_attention(every_head[0], every_head[1], every_head[2], is_causal=True)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    return all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))


GROUP_TOKENS = {"cpu": 128, "cuda": 4096}
"""Query tokens per group of the `sdpa` back end, by device type."""
KEPT_MASKS = 2**24
"""Bytes of a batch's masks that are kept; others are made again in every layer, forward and backward."""
TILE = 128
"""Queries, and keys, per tile: the default of flex's kernels."""


class KeyValue(NamedTuple):
    """Keys and values, (B, kv_heads, n, D) each."""

    key: Tensor
    value: Tensor

    def select(self, span: slice) -> KeyValue:
        """Return those at the positions of `span`."""
        return KeyValue(self.key[:, :, span], self.value[:, :, span])

    def concat(self, others: KeyValue) -> KeyValue:
        """Return these followed by `others`, along the positions."""
        return KeyValue(*(torch.cat(both, dim=2) for both in zip(self, others, strict=True)))


@dataclass(frozen=True)
class Window:
    """How far back draft tokens see.

    Attributes:
        size: number of positions.
        from_anchor: all tokens of a block see the newest `size` positions of the context, and their block, as in speculators;
            otherwise each sees the newest `size` positions up to itself, as in z-lab's code, SGLang and vLLM.
        both_ways: with `from_anchor`, tokens see those after them in the block too.
    """

    size: int
    from_anchor: bool = False
    both_ways: bool = False


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """Bounds of the keys that n draft tokens see: context in [begin, end), draft tokens in [own_begin, own_end).

    Attributes:
        begin, end, own_begin, own_end: (B, n) int64. Without a window, `begin` is the first position of the token's
            document; the token is as many positions after its `end` as it is after its `own_begin`.
        context: S, number of context keys.
    """

    begin: Tensor
    end: Tensor
    own_begin: Tensor
    own_end: Tensor
    context: int

    def with_window(self, window: Window | None) -> SeenKeys:
        """Keep the keys that the window shows; None keeps all."""
        if window is None:
            return self
        token = torch.arange(self.begin.shape[1], device=self.begin.device)
        own_end = self.own_end if window.both_ways else torch.minimum(self.own_end, token + 1)
        if window.from_anchor:
            return replace(self, begin=torch.maximum(self.begin, self.end - window.size), own_end=own_end)
        positions = self.end + token - self.own_begin
        return replace(
            self,
            begin=torch.maximum(self.begin, positions - window.size + 1),
            own_begin=torch.maximum(self.own_begin, token - window.size + 1),
            own_end=own_end,
        )

    def make_mask(self, group: Group | None = None) -> Tensor:
        """Return the mask of all tokens, (B, 1, n, S + n) bool, or of a group, (B, 1, tokens, its context + own keys)."""
        tokens, context, own = group or Group(slice(None), slice(0, self.context), slice(0, self.begin.shape[1]))
        in_context = _between(context, self.begin[:, tokens], self.end[:, tokens])
        return torch.cat([in_context, _between(own, self.own_begin[:, tokens], self.own_end[:, tokens])], -1)[:, None]

    def split_tokens(self, most: int) -> list[slice]:
        """Split the tokens into pieces of one document each, of even size and at most `most` tokens."""
        pieces, start = [], 0
        for count in self.begin.amin(0).unique_consecutive(return_counts=True)[1].tolist():
            size = -(-count // -(-count // most))
            pieces += [slice(at, min(at + size, start + count)) for at in range(start, start + count, size)]
            start += count
        return pieces

    def make_groups(self, pieces: list[slice]) -> list[Group]:
        """Pair each piece of the tokens with the ranges of keys that it sees."""
        bounds = (self.begin.amin(0), self.end.amax(0), self.own_begin.amin(0), self.own_end.amax(0))
        begin, end, own_begin, own_end = torch.stack(bounds).tolist()
        return [Group(at, _span(begin[at], end[at]), _span(own_begin[at], own_end[at])) for at in pieces]

    def make_block_mask(self) -> Any:
        """Return flex's `BlockMask`, the same for all heads.

        It is built tile by tile: nothing as large as queries times keys is ever held.
        """
        from torch.nn.attention.flex_attention import BlockMask

        begin, end = self.begin, self.end
        own_begin, own_end = self.own_begin + self.context, self.own_end + self.context

        def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            in_context = (kv >= begin[batch, q]) & (kv < end[batch, q])
            return in_context | ((kv >= own_begin[batch, q]) & (kv < own_end[batch, q]))

        count = begin.shape[1]
        first = torch.arange(0, self.context + count, TILE, device=begin.device)
        touched = _find_touched_tiles(first, begin, end) | _find_touched_tiles(first, own_begin, own_end)
        whole = _by_tile(begin, count + self.context).amax(-1, True) <= first
        whole = whole & (_by_tile(end, 0).amin(-1, True) >= first + TILE)
        lists = (*_list_tiles(touched & ~whole), *_list_tiles(whole))
        lengths = (count, self.context + count)
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=lengths)


class Group(NamedTuple):
    """Tokens that attend together, and the ranges of context and own keys that contain all keys they see."""

    tokens: slice
    context: slice
    own: slice


def _span(begins: list[int], ends: list[int]) -> slice:
    end = max(ends)
    return slice(min(*begins, end), end)


def _between(keys: slice, begin: Tensor, end: Tensor) -> Tensor:
    """Return whether each of `keys` is in [begin, end), (B, n, keys) bool."""
    key = torch.arange(keys.start, keys.stop, device=begin.device)
    return (key >= begin[..., None]) & (key < end[..., None])


def _find_touched_tiles(first: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Return the tiles that may contain keys of [begin, end), (B, query tiles, key tiles) bool; a superset."""
    lowest = _by_tile(begin, torch.iinfo(begin.dtype).max).amin(-1, True)
    return (lowest < first + TILE) & (_by_tile(end, 0).amax(-1, True) > first)


def _by_tile(bounds: Tensor, fill: int) -> Tensor:
    """Pad (B, n) to whole tiles, (B, tiles, TILE)."""
    return F.pad(bounds, (0, -bounds.shape[1] % TILE), value=fill).unflatten(1, (-1, TILE))


def _list_tiles(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return flex's lists per query tile: how many key tiles, and their numbers first; int32."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


class GroupMasks:
    """The groups of a batch's draft tokens, and their masks."""

    def __init__(self, seen: SeenKeys, pieces: list[slice]) -> None:
        self.groups = seen.make_groups(pieces)
        self._seen, self._room = seen, KEPT_MASKS
        self._kept: dict[int, Tensor] = {}

    def make(self, number: int) -> Tensor:
        """Return the mask (B, 1, tokens, its keys) bool of a group."""
        mask = self._kept.get(number)
        if mask is None:
            mask = self._seen.make_mask(self.groups[number])
            if mask.numel() <= self._room:
                self._kept[number] = mask
                self._room -= mask.numel()
        return mask


class DraftAttention:
    """Attention of a batch's draft tokens, shared by all layers: masks are built once for each window.

    Args:
        seen: the keys that each draft token sees.
        backend: eager, sdpa, flex, or auto; see the top of this module.
        strategy: name for the error message.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """

    def __init__(self, seen: SeenKeys, backend: str = "auto", strategy: str = "dflash") -> None:
        if backend == "flex":
            check_flex(strategy, seen.begin.device)
        self._seen = seen
        self._backend = backend
        self._pieces: list[slice] = []
        self._masks: dict[Window | None, GroupMasks] = {}
        self._flex_masks: dict[Window | None, Any] = {}

    @without_compile  # groups differ from batch to batch; flex is compiled by itself
    def __call__(self, query: Tensor, context: KeyValue, own: KeyValue, window: Window | None = None) -> Tensor:
        """Return the attention of one layer, (B, heads, n, D).

        Args:
            query: (B, heads, n, D), heads a multiple of kv_heads.
            context: keys and values of the S context positions.
            own: keys and values of the n draft tokens.
            window: of the layer; None for no window.
        """
        if not query.shape[2]:
            return query
        backend = self._choose(query) if self._backend == "auto" else self._backend
        attend = {"eager": self._eager, "sdpa": self._sdpa, "flex": self._flex}[backend]
        return attend(query, context, own, window)

    def _choose(self, query: Tensor) -> str:
        enough = query.shape[2] >= TILE
        return "flex" if enough and flex_works(query.device, query.dtype, query.shape[-1]) else "sdpa"

    def _eager(self, query: Tensor, context: KeyValue, own: KeyValue, window: Window | None) -> Tensor:
        groups = query.shape[1] // own.key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in context.concat(own))  # (B, heads, S + n, D)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5  # (B, heads, n, S + n)
        seen = self._seen.with_window(window).make_mask()
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(query.dtype) @ value

    def _sdpa(self, query: Tensor, context: KeyValue, own: KeyValue, window: Window | None) -> Tensor:
        if window not in self._masks:
            # Pieces follow documents, so they are cut from the bounds before a window moves the beginnings.
            self._pieces = self._pieces or self._seen.split_tokens(
                GROUP_TOKENS.get(query.device.type, GROUP_TOKENS["cuda"])
            )
            self._masks[window] = GroupMasks(self._seen.with_window(window), self._pieces)
        return _InGroups.apply(self._masks[window], query, *context, *own)

    def _flex(self, query: Tensor, context: KeyValue, own: KeyValue, window: Window | None) -> Tensor:
        if window not in self._flex_masks:
            self._flex_masks[window] = self._seen.with_window(window).make_block_mask()
        key, value = context.concat(own)
        attention = get_flex_attention(query.device.type)
        return attention(query, key, value, block_mask=self._flex_masks[window], enable_gqa=True)


class _InGroups(torch.autograd.Function):
    """Attention group by group; neither scores nor a group's keys are kept for the backward pass."""

    @staticmethod
    def forward(ctx, masks: GroupMasks, query: Tensor, *keys_and_values: Tensor) -> Tensor:
        kernel = choose_masked_kernel(query.device.type, query.dtype, query.shape[-1])
        output, sums = torch.empty_like(query), []
        for number, group in enumerate(masks.groups):
            attended = kernel.forward(*_part(group, query, *keys_and_values), masks.make(number))
            output[:, :, group.tokens] = attended.output
            sums.append(attended.lse)
        ctx.save_for_backward(query, *keys_and_values, output, *sums)
        ctx.masks, ctx.kernel = masks, kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, *keys_and_values, output = ctx.saved_tensors[:6]
        gradients = [torch.zeros_like(x) for x in (query, *keys_and_values)]
        for number, (group, lse) in enumerate(zip(ctx.masks.groups, ctx.saved_tensors[6:], strict=True)):
            attended = Attended(output[:, :, group.tokens], lse)
            inputs = _part(group, query, *keys_and_values)
            d_query, *both = ctx.kernel.backward(grad[:, :, group.tokens], *inputs, ctx.masks.make(number), attended)
            gradients[0][:, :, group.tokens] = d_query
            reach = group.context.stop - group.context.start
            for d_joined, d_context, d_own in zip(both, gradients[1:3], gradients[3:], strict=True):
                d_context[:, :, group.context] += d_joined[:, :, :reach]
                d_own[:, :, group.own] += d_joined[:, :, reach:]
        return None, *gradients


def _part(group: Group, query: Tensor, *keys_and_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of a group; `keys_and_values` are the context's, then the draft tokens'."""
    context, own = KeyValue(*keys_and_values[:2]), KeyValue(*keys_and_values[2:])
    key, value = context.select(group.context).concat(own.select(group.own))
    return query[:, :, group.tokens], key, value
