"""Blocks that a block draft is trained on: anchors drawn per sample and step, and the labels after them.

A block begins at its *anchor*, the last known token; the draft proposes the tokens after it. A hash of (seed, step,
sample, position) decides which anchors are drawn, so padding, batching, the number of ranks and a resume change
nothing, and no random numbers have to be copied from the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.attention import SeenKeys
from draftworks.drafts.documents import Documents
from draftworks.storage.identity import digest

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Blocks:
    """A blocks for each of B batch rows, by ascending anchor; a batch row with fewer is filled up with dead ones.

    A block belongs to the document that its anchor is in: its context begins there and its labels end there.

    Attributes:
        anchors: (B, A) int64, positions in the batch row; 0 for a dead block.
        live: (B, A) bool.
        size: tokens of a block, the anchor included.
        documents: the documents of the batch rows; None where each batch row is one document.
    """

    anchors: Tensor
    live: Tensor
    size: int
    documents: Documents | None = None

    @property
    def row_positions(self) -> Tensor:
        """Position in the batch row of every token of every block, (B, A · size) int64."""
        return self._tokens_from(self.anchors)

    @property
    def positions(self) -> Tensor:
        """Position in its document of every token of every block, (B, A · size) int64."""
        return self._tokens_from(self.anchors - self.begins)

    @property
    def begins(self) -> Tensor:
        """Position in the batch row at which the document of each block begins, (B, A) int64."""
        return torch.zeros_like(self.anchors) if self.documents is None else self.documents.begins[self.anchors]

    @property
    def count(self) -> int:
        return self.anchors.shape[1]

    def make_seen_keys(self, length: int) -> SeenKeys:
        """Return the keys that each block token attends to: its document before the anchor, and its own block.

        Args:
            length: S, positions of a batch row.
        """
        begin, end = (x.repeat_interleave(self.size, dim=1) for x in (self.begins, self.anchors))  # (B, A · size)
        token = torch.arange(end.shape[1], device=end.device)
        own_begin = (token - token % self.size).expand_as(end)
        return SeenKeys(begin, end, own_begin, own_begin + self.size, length)

    def select(self, start: int, stop: int) -> Blocks:
        """Return the blocks start to stop - 1 of every batch row."""
        return replace(self, anchors=self.anchors[:, start:stop], live=self.live[:, start:stop])

    def _tokens_from(self, first: Tensor) -> Tensor:
        """From the first position of every block, (B, A), to those of all its tokens, (B, A · size)."""
        offsets = torch.arange(self.size, device=first.device)
        return (first[..., None] + offsets).flatten(1)


def derive_sample_seed(seed: int, sample_id: str) -> int:
    """Return the seed of a sample's draws, 63 bits."""
    return int(digest([seed, sample_id])[:15], 16)


def draw_blocks(
    candidates: Tensor, seeds: Tensor, step: int, count: int, size: int, documents: Documents | None = None
) -> Blocks:
    """Draw at most `count` anchors per document from the candidate positions, seeded by sample and step.

    Args:
        candidates: (B, S) bool, positions that may be anchors.
        seeds: (documents,) int64 by `derive_sample_seed`, batch row after batch row.
        step: optimizer step; every step draws anew.
        documents: the documents of the batch rows; None where each batch row is one document.
    """
    within = documents or Documents.from_lengths((candidates.shape[1],), candidates.device)
    scores = _hash_positions(seeds, step, len(candidates), within).masked_fill(~candidates, _LAST)
    order = _sort_within(scores, within)
    drawn = candidates.gather(1, order) & (within.positions < count)  # (B, S), in the order of the scores
    return place_blocks(torch.zeros_like(candidates).scatter(1, order, drawn), size, documents)


def place_blocks(candidates: Tensor, size: int, documents: Documents | None = None) -> Blocks:
    """Return a block at every candidate position (B, S) bool; at least one block per batch row, live or dead."""
    available = candidates.sum(1)
    width = max(1, int(available.max()))
    order = (~candidates).to(torch.int8).argsort(dim=1, stable=True)  # (B, S), candidates first
    live = torch.arange(width, device=order.device) < available[:, None]  # (B, A)
    return Blocks(torch.where(live, order[:, :width], 0), live, size, documents)


def shuffle_positions(seeds: Tensor, step: int, batch_rows: int, documents: Documents) -> Tensor:
    """Return the positions of every document in random order, (B, S) int64; each keeps its range of the batch row.

    Taking the first n candidates of a document in this order draws n of them evenly. Arguments as in `draw_blocks`.
    """
    return _sort_within(_hash_positions(seeds, step, batch_rows, documents), documents)


def _hash_positions(seeds: Tensor, step: int, batch_rows: int, documents: Documents) -> Tensor:
    """Return a random non-negative number for every position, (B, S) int64."""
    of_tokens = _mix(seeds + step).view(batch_rows, -1)[:, documents.document_ids]  # (B, S)
    return _mix(of_tokens + documents.positions) & _LAST


def _sort_within(scores: Tensor, documents: Documents) -> Tensor:
    """Return the positions (B, S) of every document by ascending score, each document in its own range."""
    order = scores.argsort(dim=1, stable=True)  # (B, S)
    if not documents.has_several:
        return order
    return order.gather(1, documents.document_ids[order].argsort(dim=1, stable=True))


def gather_labels(blocks: Blocks, input_ids: Tensor) -> Tensor:
    """Return the tokens after each anchor, (B, A, size - 1) int64; 0 beyond the end of the document."""
    return _gather_after(blocks, input_ids)


def make_label_mask(blocks: Blocks, loss_mask: Tensor, contiguous: bool) -> Tensor:
    """Return which labels count in the loss, (B, A, size - 1) bool: those that are on in the loss mask.

    Args:
        contiguous: leave out labels behind the end of the answer that the anchor is in; no server gets there.
    """
    mask = _gather_after(blocks, loss_mask) & blocks.live[..., None]
    return mask.cumprod(-1).bool() if contiguous else mask


def _gather_after(blocks: Blocks, values: Tensor) -> Tensor:
    """Gather `values` (B, S) at the positions after each anchor, (B, A, size - 1); 0 beyond the document."""
    padded = F.pad(values, (0, blocks.size))  # (B, S + size)
    index = blocks.row_positions.unflatten(1, (-1, blocks.size))[..., 1:]  # (B, A, size - 1)
    ahead = padded.gather(1, index.flatten(1)).view_as(index)
    if blocks.documents is None or not blocks.documents.has_several:
        return ahead
    return ahead.masked_fill(index >= blocks.documents.ends[blocks.anchors][..., None], 0)


def _mix(x: Tensor) -> Tensor:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic."""
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
