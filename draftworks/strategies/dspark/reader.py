"""The DSpark chain from the weights of an exported draft: the rows of a DFlash block, then one token after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportReader, Features
from draftworks.export.readers.vocabulary import DraftVocabulary
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.reader import DFlashReader


class _Place(NamedTuple):
    """Of a proposal: its row of the block (H,), and what the Markov head embeds the token before it to (r,)."""

    row: Tensor
    before: Tensor


@dataclass(frozen=True)
class DSparkReader(ExportReader):
    """Proposal i is said by row i of the block, the anchor's own row first. To its logits comes what the Markov head makes of
    the token before it: the anchor, then the proposals.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype
    backbone: DFlashReader = field(repr=False)
    markov: str | None
    """Kind of the Markov head; None where there is none."""
    confidence_with_markov: bool

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        places = list(self._places(features, next_tokens, drawn))
        base = torch.stack([place.row for place in places]) @ self.backbone.head.T
        if self.markov is None:
            return base
        narrow = self._recurrent(places) if self.markov == "rnn" else [self._memoryless(place) for place in places]
        return base + torch.stack(narrow) @ self._weight("markov_head.markov_w2.weight").T

    @torch.no_grad()
    def confidence(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Logits (k,) of each proposal being accepted, of a draft that has such a head. Arguments as for `logits`."""
        weight, bias = (self._weight(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
        read = [
            torch.cat([place.row, place.before]) if self.confidence_with_markov else place.row
            for place in self._places(features, next_tokens, drawn)
        ]
        return torch.stack(read) @ weight[0] + bias

    def _places(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Iterator[_Place]:
        rows = self.backbone.rows(features, next_tokens)
        if len(drawn) > len(rows):
            raise ValueError(f"a block has {len(rows)} proposals, asked for {len(drawn)}")
        before = [int(next_tokens[-1]), *drawn[:-1].tolist()]
        for row, token in zip(rows, before):
            yield _Place(row, row[:0] if self.markov is None else self._weight("markov_head.markov_w1.weight")[token])

    def _memoryless(self, place: _Place) -> Tensor:
        if self.markov == "vanilla":
            return place.before
        return self._affine("gate_proj", place.row, place.before).sigmoid() * place.before

    def _recurrent(self, places: list[_Place]) -> list[Tensor]:
        state = torch.zeros_like(places[0].before)
        narrow = []
        for place in places:
            keep, new, out = self._affine("joint_proj", state, place.before, place.row).view(3, -1)
            narrow.append(out.tanh())
            state = new.tanh() + keep.sigmoid() * (state - new.tanh())
        return narrow

    def _affine(self, name: str, *inputs: Tensor) -> Tensor:
        weight, bias = (self._weight(f"markov_head.{name}.{part}") for part in ("weight", "bias"))
        return weight @ torch.cat(inputs) + bias

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[name]
