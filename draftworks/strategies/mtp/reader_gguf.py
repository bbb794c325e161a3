"""An MTP layer of Qwen3-Next or Qwen3.5 from a GGUF file, as llama.cpp b11434 computes it (src/models/qwen35.cpp, qwen3next.cpp).

The layer is that of the other formats; norms in the file hold one more than Qwen's weights, experts are stacked by their
parts, and embedding and head are the file's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftworks.export.readers.gguf_file import read_gguf_rope
from draftworks.export.readers.reader import DraftVocabulary, ExportFolder, TargetTensors
from draftworks.strategies.mtp.reader import LayerNames, QwenReader

_PARTS = {
    "nextn.eh_proj": "fc",
    "nextn.hnorm": "hidden_norm",
    "nextn.enorm": "token_norm",
    "nextn.shared_head_norm": "norm",
    "attn_norm": "layer.input_layernorm",
    "post_attention_norm": "layer.post_attention_layernorm",
    "attn_q": "layer.self_attn.q_proj",
    "attn_k": "layer.self_attn.k_proj",
    "attn_v": "layer.self_attn.v_proj",
    "attn_output": "layer.self_attn.o_proj",
    "attn_q_norm": "layer.self_attn.q_norm",
    "attn_k_norm": "layer.self_attn.k_norm",
    "ffn_gate": "layer.mlp.gate_proj",
    "ffn_up": "layer.mlp.up_proj",
    "ffn_down": "layer.mlp.down_proj",
    "ffn_gate_inp": "layer.mlp.gate",
    "ffn_gate_shexp": "layer.mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "layer.mlp.shared_expert.up_proj",
    "ffn_down_shexp": "layer.mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "layer.mlp.shared_expert_gate",
}
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def read_gguf_mtp(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> QwenReader:
    """Read a layer as llama.cpp does."""
    name = folder.require_setting("general.architecture")
    block = f"blk.{folder.require_setting(f'{name}.block_count') - 1}."
    found = folder.cast_weights(dtype)
    weights: dict[str, Tensor] = {}
    for key in (each for each in found if each.startswith(block)):
        part = key.removeprefix(block).removesuffix(".weight")
        if part in _STACKED:
            each = enumerate(found[key])
            weights |= {f"layer.mlp.experts.{number}.{_STACKED[part]}.weight": expert for number, expert in each}
        else:
            weights[f"{_PARTS[part]}.weight"] = found[key] - 1 if found[key].ndim == 1 else found[key]
    turned = folder.require_setting(f"{name}.rope.dimension_count")
    settings = {
        "head_dim": folder.require_setting(f"{name}.attention.key_length"),
        "rms_norm_eps": folder.require_setting(f"{name}.attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": folder.find_setting(f"{name}.expert_used_count"),
    }
    lent = TargetTensors(found["token_embd.weight"], found.get("output.weight", found["token_embd.weight"]))
    size = len(lent.embedding)
    return QwenReader(
        taps=(),
        vocabulary=DraftVocabulary(torch.arange(size), size),
        dtype=dtype,
        folder=ExportFolder(folder.path, settings, {}),
        section="",
        names=LayerNames("fc", "hidden_norm", "token_norm", "norm", "layer."),
        weights=weights,
        target=lent,
        rope=read_gguf_rope(folder, name, turned),
    )
