"""The Domino chain from the weights of an exported draft: the rows of a DFlash block, then one token after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportReader, Features
from draftworks.export.readers.vocabulary import DraftVocabulary
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.reader import DFlashReader


@dataclass(frozen=True)
class DominoReader(ExportReader):
    """Proposal i is said by row `first_row` + i. The first is the backbone's own; to the logits of every later one comes
    what its row and the state of the GRU give, which has read the anchor and the proposals before it.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype
    backbone: DFlashReader = field(repr=False)
    first_row: int

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        rows = self.backbone.rows(features, next_tokens)[self.first_row :]
        if len(drawn) > len(rows):
            raise ValueError(f"a block has {len(rows)} proposals, asked for {len(drawn)}")
        said = [rows[0] @ self.backbone.head.T]
        state = self._read(int(next_tokens[-1]), torch.zeros_like(self._weight("prefix_gru.weight_hh_l0")[0]))
        for row, before in zip(rows[1 : len(drawn)], drawn.tolist()):
            state = self._read(before, state)
            said.append(row @ self.backbone.head.T + self._correction(row, state))
        return torch.stack(said)

    def _correction(self, row: Tensor, state: Tensor) -> Tensor:
        narrow = self._weight("embed_proj.0.weight") @ torch.cat([row, state])
        return self._weight("embed_proj.2.weight") @ (narrow * narrow.sigmoid())

    def _read(self, token: int, state: Tensor) -> Tensor:
        """A gated recurrent unit; its weights hold the reset, the update and the new part below each other."""
        of_token = self._weight("prefix_gru.weight_ih_l0") @ self.backbone.embedding[token]
        of_state = self._weight("prefix_gru.weight_hh_l0") @ state
        token_parts, state_parts = of_token.view(3, -1), of_state.view(3, -1)
        reset, keep = (token_parts[:2] + state_parts[:2]).sigmoid()
        new = (token_parts[2] + reset * state_parts[2]).tanh()
        return new + keep * (state - new)

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[name]
