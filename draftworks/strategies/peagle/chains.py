"""P-EAGLE's chains: every position, followed by masked places up to a depth that is drawn at random.

A *chain* begins at a position of the batch, its anchor, at depth 0; at depth d it is d positions further, with a mask token in
place of the unknown token. COD sampling (conditional on distribution; speculators' `peagle/data.py`, SpecForge's
`core/peagle.py`) keeps fewer chains at each depth: a chain that ends at one depth is absent at the next. Which ones are kept
is a hash of (seed, step, sample, position), as in draftworks.drafts.anchors.

Shapes: N = B·S positions of the batch, R masked places of all chains, D depths.
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
    """Of n positions supervised at depth 0, at most ⌊(n - d)·max(ratio^d, least)⌋ are kept at depth d."""

    ratio: float
    least: float

    def quota(self, positions: Tensor, depth: int) -> Tensor:
        """Return the number of positions kept at a depth, of (…) int64 positions at depth 0."""
        share = max(self.ratio**depth, self.least)
        return ((positions - depth).clamp(min=0).double() * share).long()


def draw_chains(label_mask: Tensor, seeds: Tensor, step: int, sampling: DepthSampling, documents: Documents) -> Tensor:
    """Draw which chains exist at which depth: (D, B, S) bool by anchor. Depth 0 is that of `label_mask`.

    Args:
        label_mask: (D, B, S) bool, where a row counts. Which rows go to depth 1 depends on depth 1 alone: in the loss mode of
            SpecForge a chain may count there and not at depth 0.
        seeds: int64, see `derive_sample_seed`: of every document, those of a row together, in order.
        sampling: how many of a document's chains are kept.
    """
    order = shuffle_positions(seeds, step, label_mask.shape[1], documents)
    supervised = _count_in_document(label_mask[0], documents)
    kept, alive = [label_mask[0]], torch.ones_like(label_mask[0])
    for depth in range(1, len(label_mask)):
        candidates = (alive & label_mask[depth]).gather(1, order)
        places = _count_up_to(candidates, documents)
        drawn = candidates & (places <= sampling.quota(supervised, depth))
        alive = torch.zeros_like(alive).scatter(1, order, drawn)
        kept.append(alive)
    return torch.stack(kept)


def keep_all_chains(label_mask: Tensor) -> Tensor:
    """Return all supervised chains, each up to its first unsupervised place: (D, B, S) bool."""
    return torch.cat([label_mask[:1], label_mask[1:].cumprod(0).bool()])


def _count_up_to(flags: Tensor, documents: Documents) -> Tensor:
    """Return the number of flags on from the beginning of the document up to each position, (B, S)."""
    counted = F.pad(flags.cumsum(1), (1, 0))
    return counted[:, 1:] - counted[:, documents.begins]


def _count_in_document(flags: Tensor, documents: Documents) -> Tensor:
    """Return the number of flags on in the document of each position, (B, S)."""
    counted = F.pad(flags.cumsum(1), (1, 0))
    return counted[:, documents.ends] - counted[:, documents.begins]


@dataclass(frozen=True, eq=False)
class Chains:
    """The R masked places of chains, chain by chain and by ascending depth; they follow the N positions of the batch.

    Attributes:
        anchors: (R,) int64, the chain's flat position among the N.
        depths: (R,) int64 from 1 on.
        batch, length: B and S.
        documents: of the batch rows.
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
        """Return the chains of `kept` (D, B, S) bool, of which depth 0 is ignored."""
        limit, batch, length = kept.shape
        anchors, deeper = kept[1:].flatten(1).T.nonzero().T
        return cls(anchors, deeper + 1, batch, length, documents, limit)

    @property
    def count(self) -> int:
        """R."""
        return self.anchors.numel()

    @property
    def positions(self) -> Tensor:
        """(R,) int64: position of every masked place in its document."""
        return self.documents.positions[self.anchors % self.length] + self.depths

    @property
    def begins(self) -> Tensor:
        """(R,) int64: flat position at which the document of every masked place begins."""
        place = self.anchors % self.length
        return self.anchors - place + self.documents.begins[place]

    def make_seen_keys(self) -> SeenKeys:
        """Return the keys that masked places see: their document up to the anchor, and their own chain up to themselves.

        A chain has no gaps and its places are adjacent, so a place at depth d sees d of them.
        """
        token = torch.arange(self.count, device=self.anchors.device)
        bounds = (self.begins, self.anchors + 1, token - self.depths + 1, token + 1)
        return SeenKeys(*(bound[None] for bound in bounds), context=self.batch * self.length)


@dataclass(frozen=True)
class TokensByDepth:
    """Supervised tokens, depth by depth: `index` (W,) int64 among the N + R, and how many of them are at each depth."""

    index: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def where(cls, kept: Tensor, chains: Chains) -> TokensByDepth:
        """Return the tokens that are on in `kept` (D, B, S), which `chains` was made of; by ascending anchor at each depth."""
        first = kept[0].flatten().nonzero().squeeze(1)
        masked = chains.depths.argsort(stable=True) + kept[0].numel()
        sizes = kept.sum(dim=(1, 2)).tolist()
        return cls(torch.cat([first, masked]), tuple(sizes))
