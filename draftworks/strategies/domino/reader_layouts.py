"""Domino from exported files: z-lab's layout of DFlash, with the projector as SGLang 0.5.23 reads it."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftworks.export.readers.files import Expected, ExportFolder
from draftworks.export.readers.reader import TargetTensors
from draftworks.strategies.dflash.reader_layouts import ZLAB, read_zlab
from draftworks.strategies.domino.reader import DominoReader

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
