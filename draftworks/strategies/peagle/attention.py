"""Attention of P-EAGLE: ordinary causal rows, and after some of them chains of masks that nothing else looks at.

A row at depth 0 sees depth 0 of its document up to itself. A row at depth d sees depth 0 up to its anchor, and of its own chain the
depths 1 … d. So the rows of depth 0 know nothing of chains, and chains nothing of each other.

The back ends of chains give the same numbers to rounding: `eager` writes all of the mask out; `sdpa` goes through the chains in
groups and cuts the context to what a group can see, makes their masks and scores again for the gradients, and keeps
neither; `flex` compiles the mask. `auto` is flex on a GPU that has shown that it can, and sdpa elsewhere; on a GPU none of this
has been measured. Depth 0 is the first step of `ttt_attention`, by the back end of that name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftworks.drafts.flex import check_flex, flex_attention_on, flex_works
from draftworks.strategies.dflash.attention import GROUP_TOKENS, KeyValue
from draftworks.strategies.dflash.attention_tiles import TILE, SeenKeys
from draftworks.strategies.peagle.chains import Chains


class ChainAttention:
    """Attention of the chains of a batch: the same in every layer.

    Args:
        backend: eager, sdpa, flex, or auto; see the top of this module.

    Raises:
        ConfigError: flex with gradients on a CPU, where torch has none.
    """

    def __init__(self, chains: Chains, backend: str = "auto") -> None:
        if backend == "flex":
            check_flex("peagle", chains.anchors.device)
        self._chains = chains
        self._backend = backend
        self._groups: tuple[_Group, ...] | None = None
        self._flex_mask: Any = None

    @torch.compiler.disable  # groups have other sizes at every step, and flex is compiled by itself
    def __call__(self, query: Tensor, context: KeyValue, own: KeyValue) -> Tensor:
        """Attention of one layer.

        Args:
            query: (1, heads, R, D).
            context: of the N rows at depth 0; heads a multiple of kv_heads.
            own: of the R rows.

        Returns:
            (1, heads, R, D).
        """
        if not self._chains.count:
            return query
        backend = self._best(query) if self._backend == "auto" else self._backend
        attend = {"eager": self._eager, "sdpa": self._sdpa, "flex": self._flex}[backend]
        return attend(query, context, own)

    def _best(self, query: Tensor) -> str:
        enough = query.shape[2] >= TILE
        return "flex" if enough and flex_works(query.device, query.dtype, query.shape[-1]) else "sdpa"

    def _eager(self, query: Tensor, context: KeyValue, own: KeyValue) -> Tensor:
        repeats = query.shape[1] // own.key.shape[1]
        key = torch.cat([context.key, own.key], dim=2).repeat_interleave(repeats, dim=1)
        value = torch.cat([context.value, own.value], dim=2).repeat_interleave(repeats, dim=1)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5
        seen = _Group(slice(0, self._chains.count), slice(0, context.key.shape[2])).sees(self._chains)
        return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(query.dtype) @ value

    def _sdpa(self, query: Tensor, context: KeyValue, own: KeyValue) -> Tensor:
        if self._groups is None:
            self._groups = _groups(self._chains)
        return _InGroups.apply(self._chains, self._groups, query, *context, *own)

    def _flex(self, query: Tensor, context: KeyValue, own: KeyValue) -> Tensor:
        if self._flex_mask is None:
            self._flex_mask = seen_keys(self._chains, context.key.shape[2]).block_mask()
        key, value = (torch.cat(both, dim=2) for both in zip(context, own, strict=True))
        attention = flex_attention_on(query.device.type)
        return attention(query, key, value, block_mask=self._flex_mask, enable_gqa=True)


class _Inputs(NamedTuple):
    """Of attention, or the gradients by them; shapes as of `ChainAttention`."""

    query: Tensor
    context_key: Tensor
    context_value: Tensor
    own_key: Tensor
    own_value: Tensor

    def attended(self, seen: Tensor) -> Tensor:
        """By torch's kernel, given which keys a row sees."""
        query = self.query
        key = torch.cat([self.context_key, self.own_key], dim=2)
        value = torch.cat([self.context_value, self.own_value], dim=2)
        # Of the kernels of a GPU that take a mask, none takes fewer heads of keys than of queries.
        if query.device.type == "cuda":
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


class _Group(NamedTuple):
    """Rows of whole chains of one document, and the rows of depth 0 that they can see."""

    rows: slice
    context: slice

    def sees(self, chains: Chains) -> Tensor:
        """(n, context + n) bool: which keys, of the context and then of the rows themselves, a row sees."""
        anchors, depths, begins = (x[self.rows, None] for x in (chains.anchors, chains.depths, chains.begins))
        places = torch.arange(self.context.start, self.context.stop, device=anchors.device)
        own = (anchors == anchors.T) & (depths >= depths.T)
        return torch.cat([(places <= anchors) & (places >= begins), own], dim=1)

    def part(self, whole: _Inputs) -> _Inputs:
        """Views of what the group needs."""
        rows, context = (slice(None), slice(None), self.rows), (slice(None), slice(None), self.context)
        return _Inputs(
            whole.query[rows],
            whole.context_key[context],
            whole.context_value[context],
            whole.own_key[rows],
            whole.own_value[rows],
        )


def _groups(chains: Chains) -> tuple[_Group, ...]:
    most = GROUP_TOKENS.get(chains.anchors.device.type, GROUP_TOKENS["cuda"])
    depths, anchors, begins = chains.depths.tolist(), chains.anchors.tolist(), chains.begins.tolist()
    groups, start = [], 0
    for end in chains.ends:
        while start < end:
            stop = min(start + most, end)
            while stop < end and depths[stop] > 1:
                stop += 1
            groups.append(_Group(slice(start, stop), slice(begins[start], anchors[stop - 1] + 1)))
            start = stop
    return tuple(groups)


class _InGroups(torch.autograd.Function):
    """torch's scaled_dot_product_attention group by group. Nothing but the inputs is kept for the gradients."""

    @staticmethod
    def forward(ctx, chains: Chains, groups: tuple[_Group, ...], *inputs: Tensor) -> Tensor:
        ctx.chains, ctx.groups = chains, groups
        ctx.save_for_backward(*inputs)
        whole = _Inputs(*inputs)
        output = torch.empty_like(whole.query)
        for group in groups:
            output[:, :, group.rows] = group.part(whole).attended(group.sees(chains))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        whole = _Inputs(*ctx.saved_tensors)
        gradients = _Inputs(*(torch.zeros_like(x) for x in whole))
        for group in ctx.groups:
            part = _Inputs(*(x.detach().requires_grad_() for x in group.part(whole)))
            with torch.enable_grad():
                output = part.attended(group.sees(ctx.chains))
            found = torch.autograd.grad(output, part, grad[:, :, group.rows])
            for total, news in zip(group.part(gradients), found, strict=True):
                total += news
        return None, None, *gradients


def seen_keys(chains: Chains, context: int) -> SeenKeys:
    """Of `context` rows at depth 0 and then the R rows themselves. A chain has no gaps, and its rows are next to each other: so
    what a row sees of it are as many rows up to itself as it is deep."""
    last = context + torch.arange(chains.count, device=chains.anchors.device)
    bounds = (chains.begins, chains.anchors + 1, last - chains.depths + 1, last + 1)
    return SeenKeys(*(bound[None] for bound in bounds), keys=context + chains.count)
