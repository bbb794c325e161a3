"""Which blocks of a sample a block strategy is trained on: anchors drawn per sample and step, whatever batch they are in.

A block begins at its *anchor*, the last token that is known; the tokens after it are to be proposed. Which anchors are drawn
is decided by a hash of (seed, step, sample, position), so that padding, batching, the number of ranks and a resume
change nothing, and nothing has to come from the host.
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
    """A blocks for each of B rows, by ascending anchor; rows with fewer are filled with dead ones.

    A block belongs to the document that its anchor is in: that is where its context begins and its labels end.

    Attributes:
        anchors: (B, A) int64, places in the row; 0 for a dead block.
        live: (B, A) bool.
        size: tokens of a block, the anchor included.
        documents: of the rows; None where each is one document.
    """

    anchors: Tensor
    live: Tensor
    size: int
    documents: Documents | None = None

    @property
    def row_positions(self) -> Tensor:
        """(B, A · size) int64: of every token of every block, in the row."""
        return self._tokens_from(self.anchors)

    @property
    def positions(self) -> Tensor:
        """The same, counted from where the document begins."""
        return self._tokens_from(self.anchors - self.begins)

    @property
    def begins(self) -> Tensor:
        """(B, A) int64: where the document of every block begins in the row."""
        return torch.zeros_like(self.anchors) if self.documents is None else self.documents.begins[self.anchors]

    @property
    def count(self) -> int:
        return self.anchors.shape[1]

    def make_seen_keys(self, length: int) -> SeenKeys:
        """A token sees its document before the anchor, of `length` positions in all, and all of its own block."""
        begin, end = (x.repeat_interleave(self.size, dim=1) for x in (self.begins, self.anchors))
        token = torch.arange(end.shape[1], device=end.device)
        own_begin = (token - token % self.size).expand_as(end)
        return SeenKeys(begin, end, own_begin, own_begin + self.size, length)

    def select(self, start: int, stop: int) -> Blocks:
        return replace(self, anchors=self.anchors[:, start:stop], live=self.live[:, start:stop])

    def _tokens_from(self, first: Tensor) -> Tensor:
        offsets = torch.arange(self.size, device=first.device)
        return (first[..., None] + offsets).flatten(1)


def derive_sample_seed(seed: int, sample_id: str) -> int:
    """63 bits that a sample's draws begin from."""
    return int(digest([seed, sample_id])[:15], 16)


def draw_blocks(
    candidates: Tensor, seeds: Tensor, step: int, count: int, size: int, documents: Documents | None = None
) -> Blocks:
    """Up to `count` of each document's candidates.

    Args:
        candidates: (B, S) bool, places that may be anchors.
        seeds: int64, see `derive_sample_seed`: of every document, those of a row together, in order.
        step: draws differ from step to step.
        documents: of the rows; None where each is one document.
    """
    within = documents or Documents.from_lengths((candidates.shape[1],), candidates.device)
    scores = _scores(seeds, step, len(candidates), within).masked_fill(~candidates, _LAST)
    order = _sorted_within(scores, within)
    drawn = candidates.gather(1, order) & (within.positions < count)
    return place_blocks(torch.zeros_like(candidates).scatter(1, order, drawn), size, documents)


def place_blocks(candidates: Tensor, size: int, documents: Documents | None = None) -> Blocks:
    """A block at every candidate (B, S); at least one in a row, dead or alive."""
    available = candidates.sum(1)
    width = max(1, int(available.max()))
    order = (~candidates).to(torch.int8).argsort(dim=1, stable=True)
    live = torch.arange(width, device=order.device) < available[:, None]
    return Blocks(torch.where(live, order[:, :width], 0), live, size, documents)


def shuffle_positions(seeds: Tensor, step: int, rows: int, documents: Documents) -> Tensor:
    """All places of every document in random order, (rows, S) int64: whoever takes the first n of those that may be drawn
    has drawn n of them evenly. Arguments as of `draw_blocks`."""
    return _sorted_within(_scores(seeds, step, rows, documents), documents)


def _scores(seeds: Tensor, step: int, rows: int, documents: Documents) -> Tensor:
    """A random number (rows, S) int64, not negative, for every place."""
    of_tokens = _mixed(seeds + step).view(rows, -1)[:, documents.document_ids]
    return _mixed(of_tokens + documents.positions) & _LAST


def _sorted_within(scores: Tensor, documents: Documents) -> Tensor:
    """The places (B, S) of every document by ascending score; a document keeps those that are its."""
    order = scores.argsort(dim=1, stable=True)
    if not documents.has_several:
        return order
    return order.gather(1, documents.document_ids[order].argsort(dim=1, stable=True))


def gather_labels(blocks: Blocks, input_ids: Tensor) -> Tensor:
    """The tokens after each anchor, (B, A, size - 1) int64; 0 beyond the end of the document."""
    return _ahead(blocks, input_ids)


def make_label_mask(blocks: Blocks, loss_mask: Tensor, contiguous: bool) -> Tensor:
    """Which labels count, (B, A, size - 1) bool: those the loss mask has.

    Args:
        contiguous: not those behind the end of the answer that the anchor is in: no server gets there.
    """
    mask = _ahead(blocks, loss_mask) & blocks.live[..., None]
    return mask.cumprod(-1).bool() if contiguous else mask


def _ahead(blocks: Blocks, values: Tensor) -> Tensor:
    """`values` (B, S) at the places after each anchor, (B, A, size - 1); 0 beyond the end of the document."""
    padded = F.pad(values, (0, blocks.size))
    index = blocks.row_positions.unflatten(1, (-1, blocks.size))[..., 1:]
    ahead = padded.gather(1, index.flatten(1)).view_as(index)
    if blocks.documents is None or not blocks.documents.has_several:
        return ahead
    return ahead.masked_fill(index >= blocks.documents.ends[blocks.anchors][..., None], 0)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic."""
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
