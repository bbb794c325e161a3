"""EAGLE-3 from a GGUF file, as llama.cpp b11434 computes it (src/models/eagle3.cpp, common/speculative.cpp).

Its layer is that of the other formats; rope turns neighbours, `target_layers` are layers whose *input* is taken, the next step
is fed the state before the norm, and `d2t` holds the target's ids themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import LayerSizes
from draftworks.export.readers.gguf_file import read_gguf_rope, turn_neighbours
from draftworks.export.readers.reader import DraftVocabulary, ExportFolder, TargetTensors, read_taps
from draftworks.strategies.eagle3.reader import Eagle3Norms, Eagle3Reader

_LAYER = "layer."
_PARTS = {
    "fc": "fc",
    "enc.output_norm": "input_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.0.attn_norm": f"{_LAYER}input_layernorm",
    "blk.0.attn_norm_2": f"{_LAYER}hidden_norm",
    "blk.0.ffn_norm": f"{_LAYER}post_attention_layernorm",
    "blk.0.attn_q": f"{_LAYER}self_attn.q_proj",
    "blk.0.attn_k": f"{_LAYER}self_attn.k_proj",
    "blk.0.attn_v": f"{_LAYER}self_attn.v_proj",
    "blk.0.attn_output": f"{_LAYER}self_attn.o_proj",
    "blk.0.ffn_gate": f"{_LAYER}mlp.gate_proj",
    "blk.0.ffn_up": f"{_LAYER}mlp.up_proj",
    "blk.0.ffn_down": f"{_LAYER}mlp.down_proj",
}


def read_gguf_eagle3(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> Eagle3Reader:
    """Read a draft as llama.cpp does."""
    head_dim = folder.config["eagle3.attention.key_length"]
    weights: dict[str, Tensor] = {}
    for name, tensor in folder.cast_weights(dtype).items():
        part = name.removesuffix(".weight")
        turned = part in ("blk.0.attn_q", "blk.0.attn_k")
        weights[f"{_PARTS.get(part, part)}.weight"] = turn_neighbours(tensor, head_dim) if turned else tensor
    norms = Eagle3Norms(
        norm_before_residual=folder.config.get("eagle3.norm_before_residual", False),
        norm_before_fc=folder.config.get("eagle3.norm_before_fc", False),
    )
    ids = folder.tensors.get("d2t", torch.arange(len(target.embedding)))
    return Eagle3Reader(
        taps=read_taps(folder, "gguf_eagle3", "eagle3.target_layers"),
        sizes=LayerSizes(
            layers=folder.config["eagle3.block_count"],
            head_dim=head_dim,
            eps=folder.config["eagle3.attention.layer_norm_rms_epsilon"],
            rope=read_gguf_rope(folder, "eagle3", head_dim),
        ),
        norms=norms,
        window=None,
        layer=_LAYER,
        vocabulary=DraftVocabulary(ids, len(target.embedding)),
        weights=weights,
        embedding=weights.get("token_embd.weight", target.embedding.to(dtype)),
        dtype=dtype,
    )
