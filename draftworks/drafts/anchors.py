"""Which blocks of a sample a block strategy is trained on: anchors drawn per sample and step, whatever batch they are in.

A block begins at its *anchor*, the last token that is known; the tokens after it are to be proposed. Which anchors are drawn
is decided by a hash of (seed, step, sample, position), so that padding, batching, the number of ranks and a resume
change nothing, and nothing has to come from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.identity import digest

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Blocks:
    """A blocks for each of B samples, by ascending anchor; samples with fewer are filled with dead ones.

    Attributes:
        anchors: (B, A) int64 positions; 0 for a dead block.
        live: (B, A) bool.
        size: tokens of a block, the anchor included.
    """

    anchors: Tensor
    live: Tensor
    size: int

    @property
    def positions(self) -> Tensor:
        """(B, A · size) int64: of every token of every block."""
        offsets = torch.arange(self.size, device=self.anchors.device)
        return (self.anchors[..., None] + offsets).flatten(1)

    @property
    def count(self) -> int:
        return self.anchors.shape[1]

    def part(self, start: int, stop: int) -> Blocks:
        return Blocks(self.anchors[:, start:stop], self.live[:, start:stop], self.size)


def sample_seed(seed: int, sample_id: str) -> int:
    """63 bits that a sample's draws begin from."""
    return int(digest([seed, sample_id])[:15], 16)


def drawn_blocks(candidates: Tensor, seeds: Tensor, step: int, count: int, size: int) -> Blocks:
    """Up to `count` of each sample's candidates.

    Args:
        candidates: (B, S) bool, positions that may be anchors.
        seeds: (B,) int64, see `sample_seed`.
        step: draws differ from step to step.
    """
    positions = torch.arange(candidates.shape[1], device=candidates.device)
    scores = _mixed(_mixed(seeds[:, None] + step) + positions) & _LAST
    order = scores.masked_fill(~candidates, _LAST).argsort(dim=1, stable=True)
    return _blocks(order, candidates.sum(1), count, size)


def all_blocks(candidates: Tensor, size: int) -> Blocks:
    """A block at every candidate (B, S)."""
    order = (~candidates).to(torch.int8).argsort(dim=1, stable=True)
    return _blocks(order, candidates.sum(1), candidates.shape[1], size)


def _blocks(order: Tensor, available: Tensor, count: int, size: int) -> Blocks:
    """The first of `order` (B, S), at most `count` and as many as are `available` (B,); at least one, dead or alive."""
    width = max(1, min(count, int(available.max())))
    live = torch.arange(width, device=order.device) < available[:, None]
    beyond = order.shape[1]
    anchors = torch.where(live, order[:, :width], beyond).sort(dim=1).values
    return Blocks(torch.where(live, anchors, 0), live, size)


def labels_of(blocks: Blocks, input_ids: Tensor) -> Tensor:
    """The tokens after each anchor, (B, A, size - 1) int64; 0 beyond the end of the batch."""
    return _ahead(blocks, input_ids)


def label_mask(blocks: Blocks, loss_mask: Tensor, contiguous: bool) -> Tensor:
    """Which labels count, (B, A, size - 1) bool: those the loss mask has.

    Args:
        contiguous: not those behind the end of the answer that the anchor is in: no server gets there.
    """
    mask = _ahead(blocks, loss_mask) & blocks.live[..., None]
    return mask.cumprod(-1).bool() if contiguous else mask


def _ahead(blocks: Blocks, values: Tensor) -> Tensor:
    """`values` (B, S) at the positions after each anchor: (B, A, size - 1)."""
    padded = F.pad(values, (0, blocks.size))
    offsets = torch.arange(1, blocks.size, device=values.device)
    index = (blocks.anchors[..., None] + offsets).flatten(1)
    return padded.gather(1, index).unflatten(1, (-1, blocks.size - 1))


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
