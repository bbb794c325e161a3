"""Which chains P-EAGLE is trained on: every row, and after it as many masked places as it has been drawn for.

A *chain* begins at a row of the batch, its anchor, at depth 0; at depth d it stands d places further, with a mask for what is
not known there. COD sampling (conditional on distribution; speculators' `peagle/data.py`, SpecForge's `core/peagle.py`)
keeps fewer and fewer of them: a chain that ends at one depth is not at the next. Which ones is decided by a hash of (seed, step,
sample, position), as for draftworks.drafts.anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import shuffle_positions
from draftworks.drafts.attention import SeenKeys
from draftworks.drafts.documents import Documents


@dataclass(frozen=True)
class DepthSampling:
    """Of n rows that count at depth 0, at most ⌊(n - d)·max(ratio^d, least)⌋ go on to depth d."""

    ratio: float
    least: float

    def quota(self, rows: Tensor, depth: int) -> Tensor:
        """For any number of rows (…) int64."""
        share = max(self.ratio**depth, self.least)
        return ((rows - depth).clamp(min=0).double() * share).long()


def draw_chains(label_mask: Tensor, seeds: Tensor, step: int, thinning: DepthSampling, documents: Documents) -> Tensor:
    """Which chains are at which depth: (D, B, S) bool by anchor. Depth 0 is that of `label_mask`.

    Args:
        label_mask: (D, B, S) bool, where a row counts. Which rows go to depth 1 depends on depth 1 alone: in the loss mode of
            SpecForge a chain may count there and not at depth 0.
        seeds: int64, see `derive_sample_seed`: of every document, those of a row together, in order.
        thinning: how many of a document's chains are kept.
    """
    order = shuffle_positions(seeds, step, label_mask.shape[1], documents)
    rows = _sums_within(label_mask[0], documents)
    kept, alive = [label_mask[0]], torch.ones_like(label_mask[0])
    for depth in range(1, len(label_mask)):
        candidates = (alive & label_mask[depth]).gather(1, order)
        places = _counted_within(candidates, documents)
        drawn = candidates & (places <= thinning.quota(rows, depth))
        alive = torch.zeros_like(alive).scatter(1, order, drawn)
        kept.append(alive)
    return torch.stack(kept)


def keep_all_chains(label_mask: Tensor) -> Tensor:
    """Every chain that counts, as far as it does so without a gap."""
    return torch.cat([label_mask[:1], label_mask[1:].cumprod(0).bool()])


def _counted_within(flags: Tensor, documents: Documents) -> Tensor:
    """How many are on (B, S), from the beginning of the document up to each place."""
    counted = F.pad(flags.cumsum(1), (1, 0))
    return counted[:, 1:] - counted[:, documents.begins]


def _sums_within(flags: Tensor, documents: Documents) -> Tensor:
    """The same to the end of the document."""
    counted = F.pad(flags.cumsum(1), (1, 0))
    return counted[:, documents.ends] - counted[:, documents.begins]


@dataclass(frozen=True, eq=False)
class Chains:
    """The masked places of chains, chain by chain and by ascending depth: R rows that follow the N = B·S rows of a batch.

    Attributes:
        anchors: (R,) int64, the chain's row among the N.
        depths: (R,) int64 from 1 on.
        batch, length: B and S.
        documents: of the rows of the batch.
        limit: D, above all depths.
    """

    anchors: Tensor
    depths: Tensor
    batch: int
    length: int
    documents: Documents
    limit: int

    @classmethod
    def of(cls, kept: Tensor, documents: Documents) -> Chains:
        """From `kept` (D, B, S); what it says of depth 0 does not matter."""
        limit, batch, length = kept.shape
        anchors, deeper = kept[1:].flatten(1).T.nonzero().T
        return cls(anchors, deeper + 1, batch, length, documents, limit)

    @property
    def count(self) -> int:
        """R."""
        return self.anchors.numel()

    @property
    def positions(self) -> Tensor:
        """(R,) int64: of every masked place in its document."""
        return self.documents.positions[self.anchors % self.length] + self.depths

    @property
    def begins(self) -> Tensor:
        """(R,) int64: of the documents, among the N rows."""
        place = self.anchors % self.length
        return self.anchors - place + self.documents.begins[place]

    def make_seen_keys(self) -> SeenKeys:
        """A masked place sees the N rows of its document up to its anchor, and its own chain up to itself. A chain has no gaps, and its
        places are next to each other: so of these it sees as many as it is deep."""
        token = torch.arange(self.count, device=self.anchors.device)
        bounds = (self.begins, self.anchors + 1, token - self.depths + 1, token + 1)
        return SeenKeys(*(bound[None] for bound in bounds), context=self.batch * self.length)


@dataclass(frozen=True)
class TokensByDepth:
    """Rows among the N + R, depth by depth: `index` (W,) int64, of which so many are of each depth."""

    index: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def where(cls, kept: Tensor, chains: Chains) -> TokensByDepth:
        """The rows that are on in `kept` (D, B, S), of which `chains` are made; ascending by anchor at every depth."""
        first = kept[0].flatten().nonzero().squeeze(1)
        masked = chains.depths.argsort(stable=True) + kept[0].numel()
        sizes = kept.sum(dim=(1, 2)).tolist()
        return cls(torch.cat([first, masked]), tuple(sizes))
