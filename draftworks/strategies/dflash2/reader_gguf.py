"""DFlash 2 from a GGUF file, as llama.cpp b11434 computes it."""

from __future__ import annotations

import torch

from draftworks.export.readers.reader import ExportFolder, TargetTensors
from draftworks.strategies.dflash.reader_gguf import read_gguf_backbone
from draftworks.strategies.dflash2.reader import DFlash2Reader, convolve, select

_PARTS = {
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.": "candidate_selector.hidden_projection.",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.": "attention_conv.kernel_projection.",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.": "mlp_conv.kernel_projection.",
}


def read_gguf_dflash2(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlash2Reader:
    """Read a draft as llama.cpp does."""
    backbone = read_gguf_backbone(folder, target, dtype, "gguf_dflash2", first_row=1, parts=_PARTS)
    taps, channels = (folder.require_setting(f"dflash.conv_{size}_size") for size in ("kernel", "group"))
    return select(convolve(backbone, taps, channels), folder.require_setting("dflash.selector_top_k"))
