"""The Domino chain from the weights of an exported draft: the rows of a DFlash block, then one token after the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftworks.export.readers.files import DraftVocabulary, Expected, ExportFolder
from draftworks.export.readers.reader import ExportReader, Features, TargetTensors
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.reader import ZLAB, DFlashReader, read_zlab


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


_SECTION = "dflash_config."


def read_zlab_domino(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DominoReader:
    """A draft as SGLang loads it.

    Raises:
        StoreError: files that it would refuse, or load as another draft than the one that was trained.
    """
    folder.must_be(f"{_SECTION}projector_type", "domino")
    folder.must_be(f"{_SECTION}pure_draft_prefix_len", 1)
    for key in ("shift_label", "emb_dim", "gru_hidden_dim"):
        folder.must_not_differ(key, folder.setting(f"{_SECTION}{key}", (int, bool)))
    layout = replace(ZLAB, export_format="zlab_domino")
    backbone = read_zlab(folder, target, dtype, layout, _projector(folder))
    return DominoReader(
        taps=backbone.taps,
        vocabulary=backbone.vocabulary,
        dtype=dtype,
        backbone=backbone,
        first_row=0 if folder.setting(f"{_SECTION}shift_label", bool) else 1,
    )


def _projector(folder: ExportFolder) -> dict[str, Expected]:
    hidden, vocab = folder.setting("hidden_size", int), folder.setting("vocab_size", int)
    state, narrow = (folder.setting(f"{_SECTION}{key}", int) for key in ("gru_hidden_dim", "emb_dim"))
    shapes = {
        "prefix_gru.weight_ih_l0": (3 * state, hidden),
        "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (narrow, hidden + state),
        "embed_proj.2.weight": (vocab, narrow),
    }
    return {name: Expected(shape) for name, shape in shapes.items()}
