"""DSpark from a GGUF file, as llama.cpp b11434 computes it: the anchor's own row proposes first, by a vanilla Markov head."""

from __future__ import annotations

import torch

from draftworks.export.readers.reader import ExportFolder, TargetTensors
from draftworks.strategies.dflash.reader_gguf import read_gguf_backbone
from draftworks.strategies.dspark.reader import DSparkReader

_PARTS = {
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "conf_proj.": "confidence_head.proj.",
}


def read_gguf_dspark(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DSparkReader:
    """Read a draft as llama.cpp does."""
    first_row = 0 if folder.find_setting("dflash.sample_from_anchor", True) else 1
    backbone = read_gguf_backbone(folder, target, dtype, "gguf_dspark", first_row, _PARTS)
    return DSparkReader(backbone, markov="vanilla", confidence_with_markov=True)
