"""DFlash from a GGUF file, as llama.cpp b11434 computes it (src/models/dflash.cpp, common/speculative.cpp).

The arithmetic is that of the other formats; rope turns halves here. A window counts from each token, and goes with a block
that is causal in all layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch

from draftworks.errors import StoreError
from draftworks.export.readers.arithmetic import LayerSizes
from draftworks.export.readers.gguf_file import read_gguf_rope
from draftworks.export.readers.reader import DraftVocabulary, ExportFolder, TargetTensors, read_taps
from draftworks.strategies.dflash.reader import DFlashReader, Mask, anchored_mask, moving_mask

_PARTS = {
    "enc.output_norm.": "hidden_norm.",
    "output_norm.": "norm.",
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "attn_q_norm.": "self_attn.q_norm.",
    "attn_k_norm.": "self_attn.k_norm.",
    "ffn_gate.": "mlp.gate_proj.",
    "ffn_up.": "mlp.up_proj.",
    "ffn_down.": "mlp.down_proj.",
}


def read_gguf_dflash(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> DFlashReader:
    """Read a draft as llama.cpp does."""
    return read_gguf_backbone(folder, target, dtype, "gguf_dflash", first_row=1)


def read_gguf_backbone(
    folder: ExportFolder,
    target: TargetTensors,
    dtype: torch.dtype,
    export_format: str,
    first_row: int,
    parts: Mapping[str, str] | None = None,
) -> DFlashReader:
    """Read the DFlash part of a draft.

    Args:
        parts: names of what comes to it, as its reader has them, by what they begin with in the file.
    """
    head_dim = folder.require_setting("dflash.attention.key_length")
    names = {**_PARTS, **(parts or {})}
    weights = {_rename(name, names): tensor for name, tensor in folder.cast_weights(dtype).items()}
    layers = folder.require_setting("dflash.block_count")
    return DFlashReader(
        taps=read_taps(folder, export_format, "dflash.target_layers"),
        sizes=LayerSizes(
            layers=layers,
            head_dim=head_dim,
            eps=folder.require_setting("dflash.attention.layer_norm_rms_epsilon"),
            rope=read_gguf_rope(folder, "dflash", head_dim),
        ),
        masks=(_read_mask(folder),) * layers,
        block_size=folder.require_setting("dflash.block_size"),
        mask_token=folder.require_setting("tokenizer.ggml.mask_token_id"),
        first_row=first_row,
        vocabulary=DraftVocabulary(torch.arange(len(target.embedding)), len(target.embedding)),
        weights=weights,
        embedding=target.embedding.to(dtype) * folder.find_setting("dflash.embedding_scale", 1.0),
        head=target.head.to(dtype),
        dtype=dtype,
    )


def _read_mask(folder: ExportFolder) -> Mask:
    window = folder.find_setting("dflash.attention.sliding_window")
    slides = folder.find_setting("dflash.attention.sliding_window_pattern", [])
    if not any(slides):
        return partial(anchored_mask, causal=folder.find_setting("dflash.attention.causal", False))
    if not all(slides) or not folder.find_setting("dflash.attention.causal", False):
        raise StoreError(f"{folder.path}: expected a window in all layers of a causal block, or none")
    return partial(moving_mask, window=window)


def _rename(name: str, parts: Mapping[str, str]) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    prefix, rest = ("", name) if layer is None else (f"layers.{layer[1]}.", name[layer.end() :])
    for theirs, ours in parts.items():
        if rest.startswith(theirs):
            return f"{prefix}{ours}{rest.removeprefix(theirs)}"
    return f"{prefix}{rest}"
