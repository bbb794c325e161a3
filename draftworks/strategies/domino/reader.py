"""Domino from exported files: the rows of a DFlash block, corrected one token after the other by what a GRU has read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.export.readers.reader import ExportFolder, Features, TargetTensors
from draftworks.strategies.dflash.reader import HeadReader, read_zlab


@dataclass(frozen=True)
class DominoReader(HeadReader):
    """Proposal i is made by row `backbone.first_row` + i. To its logits comes a correction, computed from the row and the
    state of a GRU that has read the anchor and the proposals before.

    Attributes:
        uncorrected: proposals at the beginning of a block that keep the backbone's own logits.
    """

    uncorrected: int

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        rows = self.backbone.proposing_rows(features, next_tokens, len(drawn))  # (k, H)
        state = torch.zeros_like(self._weight("prefix_gru.weight_hh_l0")[0])  # (GRU state,)
        corrections = []
        for row, token in zip(rows, [int(next_tokens[-1]), *drawn.tolist()]):
            state = self._step_gru(token, state)
            corrections.append(self._correct(row, state))
        corrected = (torch.arange(len(drawn)) >= self.uncorrected)[:, None]
        return rows @ self.backbone.head.T + torch.stack(corrections) * corrected

    def _correct(self, row: Tensor, state: Tensor) -> Tensor:
        """Return what is added to the logits, (V,)."""
        narrow = self._weight("embed_proj.0.weight") @ torch.cat([row, state])
        return self._weight("embed_proj.2.weight") @ (narrow * narrow.sigmoid())

    def _step_gru(self, token: int, state: Tensor) -> Tensor:
        """Return the next state of a gated recurrent unit without biases (Cho et al., arXiv 1406.1078, as in torch).

        Its weights hold the reset, the update and the new part, one below the other.
        """
        of_token = self._weight("prefix_gru.weight_ih_l0") @ self.backbone.embedding[token]
        of_state = self._weight("prefix_gru.weight_hh_l0") @ state
        token_parts, state_parts = of_token.view(3, -1), of_state.view(3, -1)
        reset, keep = (token_parts[:2] + state_parts[:2]).sigmoid()
        new = (token_parts[2] + reset * state_parts[2]).tanh()
        return new + keep * (state - new)

    def _weight(self, name: str) -> Tensor:
        return self.backbone.weights[name]


def read_zlab_domino(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DominoReader:
    """Read a draft as SGLang does."""
    first_row = 0 if folder.require_setting("dflash_config.shift_label") else 1
    backbone = read_zlab(folder, target, dtype, "zlab_domino", first_row)
    uncorrected = folder.require_setting("dflash_config.pure_draft_prefix_len")
    return DominoReader(backbone, uncorrected)
