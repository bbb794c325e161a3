"""The mask of block attention for flex, made tile by tile: nothing as large as queries times keys is ever held.

Keys are the context, then the blocks' own tokens. Under every rule of block attention a token sees two intervals of them: some
of the context before its anchor, and some of its own block. So do the masked places of P-EAGLE, whose blocks are chains
(draftworks.strategies.peagle.attention). The mask is four bounds for each token, and which tiles of the
score matrix are empty, whole or in between follows from the bounds' extremes over a tile of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import Blocks

TILE = 128
"""Queries, and keys, of a tile: what flex's kernels take by default."""


@dataclass(frozen=True)
class SeenKeys:
    """Which of S + n keys the n tokens of all blocks see: those in [begin, end) and in [own_begin, own_end).

    Attributes:
        begin, end, own_begin, own_end: (B, n) int64. The first two are below S, or at it; the others are not below.
        keys: S + n.
    """

    begin: Tensor
    end: Tensor
    own_begin: Tensor
    own_end: Tensor
    keys: int

    @classmethod
    def of(cls, blocks: Blocks, length: int, window: int | None) -> SeenKeys:
        """Of all blocks over a context of `length` positions; `window` as in `BlockAttention`."""
        size, shape = blocks.size, blocks.places.shape
        begin, end = (x.repeat_interleave(size, dim=1) for x in (blocks.begins, blocks.anchors))
        token = torch.arange(shape[1], device=end.device)
        own_begin = token - token % size
        own_end = own_begin + size
        if window is not None:
            begin = torch.maximum(begin, blocks.places - window + 1)
            own_begin, own_end = torch.maximum(own_begin, token - window + 1), token + 1
        own_begin, own_end = ((length + bound).expand(shape) for bound in (own_begin, own_end))
        return cls(begin, end, own_begin, own_end, length + shape[1])

    def block_mask(self) -> Any:
        """flex's `BlockMask` of it, the same for all heads."""
        from torch.nn.attention.flex_attention import BlockMask

        begin, end, own_begin, own_end = self.begin, self.end, self.own_begin, self.own_end

        def seen(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            in_context = (kv >= begin[batch, q]) & (kv < end[batch, q])
            return in_context | ((kv >= own_begin[batch, q]) & (kv < own_end[batch, q]))

        touched, whole = self._touched(), self._whole()
        partial, full = _listed(touched & ~whole), _listed(whole)
        lengths = (self.begin.shape[1], self.keys)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=lengths)

    def _touched(self) -> Tensor:
        """(B, tiles of queries, tiles of keys) bool: all tiles in which anything is seen, and maybe some others."""
        first = torch.arange(0, self.keys, TILE, device=self.begin.device)
        found = False
        for begin, end in ((self.begin, self.end), (self.own_begin, self.own_end)):
            lowest, highest = _by_tile(begin, self.keys).amin(-1, True), _by_tile(end, 0).amax(-1, True)
            found = found | ((lowest < first + TILE) & (highest > first))
        return found

    def _whole(self) -> Tensor:
        """The same of tiles in which everything is seen, as far as the context goes."""
        first = torch.arange(0, self.keys, TILE, device=self.begin.device)
        highest, lowest = _by_tile(self.begin, self.keys).amax(-1, True), _by_tile(self.end, 0).amin(-1, True)
        return (highest <= first) & (lowest >= first + TILE)


def _by_tile(bounds: Tensor, fill: int) -> Tensor:
    """(B, n) to (B, tiles, TILE)."""
    return F.pad(bounds, (0, -bounds.shape[1] % TILE), value=fill).unflatten(1, (-1, TILE))


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """As flex wants them, for each tile of queries: how many tiles of keys, and which, those first; int32."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
