"""Export format of an MTP layer for llama.cpp: what its converter writes of a target with `--mtp` (conversion/qwen.py, b11434).

Such a file is one of the target's own class with the layer alone: its metadata are the target's, a layer longer, and embedding,
head and last norm are the target's too, since the server reads a draft's own. Norms there hold one more than Qwen's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import read_final_norm
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft, round_tensor
from draftworks.export.config_keys import require
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.export.gguf_file import ARCHITECTURE, Rounding, to_single
from draftworks.export.gguf_format import GgufFormat, require_kind
from draftworks.export.readers.gguf_file import DRAFT_FILE
from draftworks.strategies.mtp.export import MtpFormat
from draftworks.strategies.mtp.target_head import TargetHead, build_modules, read_whole_config
from draftworks.targets.gguf_model import shorten

ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
"""llama.cpp's names of the types of targets whose layer it reads."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_PARTS = {
    "fc": "nextn.eh_proj",
    "hidden_norm": "nextn.hnorm",
    "token_norm": "nextn.enorm",
    "norm": "nextn.shared_head_norm",
    "layer.input_layernorm": "attn_norm",
    "layer.post_attention_layernorm": "post_attention_norm",
    "layer.self_attn.q_proj": "attn_q",
    "layer.self_attn.k_proj": "attn_k",
    "layer.self_attn.v_proj": "attn_v",
    "layer.self_attn.o_proj": "attn_output",
    "layer.self_attn.q_norm": "attn_q_norm",
    "layer.self_attn.k_norm": "attn_k_norm",
    "layer.mlp.gate_proj": "ffn_gate",
    "layer.mlp.up_proj": "ffn_up",
    "layer.mlp.down_proj": "ffn_down",
    "layer.mlp.gate": "ffn_gate_inp",
    "layer.mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "layer.mlp.shared_expert.up_proj": "ffn_up_shexp",
    "layer.mlp.shared_expert.down_proj": "ffn_down_shexp",
    "layer.mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
"""Names of the layer's tensors in the file, behind its number, by the draft's own; experts are stacked there."""


@dataclass(frozen=True)
class _WholeNorms(Rounding):
    """Vectors as they are: one is added to them, and a sum is rounded otherwise than what was added."""

    def hold(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.ndim == 1 else round_tensor(tensor, self.dtype)


class GgufMtp(GgufFormat, MtpFormat):
    name = "gguf_mtp"
    spec_type = "draft-mtp"

    def count_proposals(self, draft: CanonicalDraft) -> int:
        return draft.config["options"]["num_steps"]

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """See the base. Raises ConfigError where a quantised layer is asked for: embedding and head would be so too."""
        if self.settings.gguf.quantise is not None:
            raise ConfigError(
                f"{self.name}: is not quantised, as it holds the target's head: leave export.gguf.quantise out"
            )
        return _WholeNorms(dtype)

    def build_strategy(self, draft: CanonicalDraft, dtype: torch.dtype) -> DraftStrategy:
        return draft.build_strategy(dtype, self.rounding(dtype).hold)

    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        return _describe(draft.target, _build_target_keys(draft.target))

    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        architecture = require(config, ARCHITECTURE, DRAFT_FILE)
        require_kind(config, _find_architecture(target), target)
        own = {key: value for key, value in config.items() if key.startswith(f"{architecture}.")}
        return _describe(target, {ARCHITECTURE: architecture, **own})

    def build_own_keys(self, draft: CanonicalDraft) -> dict[str, Any]:
        return _build_target_keys(draft.target)

    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        return self.join_keys(draft, dtype, self.build_own_keys(draft), draft.parts.vocab_size)

    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        parts, block = draft.parts, f"blk.{draft.target.num_layers}."
        found = {f"{block}{name}": tensor for name, tensor in _rename(draft.weights).items()}
        norm = read_final_norm(draft.target, parts.hidden_size).float()
        found |= {"token_embd.weight": parts.embedding, "output_norm.weight": norm + 1}
        return found if parts.tied else {**found, "output.weight": parts.head}

    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        return dict(shape.options["tensors"])


def _find_architecture(target: TargetFiles) -> str:
    return ARCHITECTURES[TargetHead.find(target).config.model_type]


def _build_target_keys(target: TargetFiles) -> dict[str, Any]:
    """Return the metadata of a target with its layer, as llama.cpp's converter derives them from config.json.

    Raises:
        ConfigError: a scaled rope, or a key that is missing.
    """
    whole, name, where = read_whole_config(target), _find_architecture(target), f"target {target.name}: config.json"
    text = whole.get("text_config", whole)
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{where}: a rope of type {rope['rope_type']}: expected default beside an MTP layer in GGUF")
    width, types = require(text, "head_dim", where), require(text, "layer_types", where)
    keys = {key: require(text, theirs, where) for key, theirs in _SIZES.items()}
    if text.get("intermediate_size"):  # Qwen3.5's with experts has none
        keys["feed_forward_length"] = text["intermediate_size"]
    if text.get("num_experts"):
        keys |= {key: require(text, theirs, where) for key, theirs in _EXPERTS.items()}
    values = require(text, "linear_value_head_dim", where) * require(text, "linear_num_value_heads", where)
    sections = rope.get("mrope_section")
    return {
        ARCHITECTURE: name,
        f"{name}.block_count": target.num_layers + 1,
        f"{name}.nextn_predict_layers": 1,
        **{f"{name}.{key}": value for key, value in keys.items()},
        f"{name}.ssm.inner_size": values,
        f"{name}.attention.layer_norm_rms_epsilon": to_single(require(text, "rms_norm_eps", where)),
        f"{name}.attention.recurrent_layers": [kind == "linear_attention" for kind in types] + [False],
        f"{name}.full_attention_interval": text.get("full_attention_interval", 4),
        f"{name}.rope.freq_base": to_single(require(rope, "rope_theta", where)),
        f"{name}.rope.dimension_count": int(width * rope.get("partial_rotary_factor", 0.25)),
        **({f"{name}.rope.dimension_sections": [*sections, 0][:4]} if sections else {}),
    }


def _describe(target: TargetFiles, keys: Mapping[str, Any]) -> DraftShape:
    """Return the shape of a layer by the metadata of its file; its tensors are those of the target's."""
    name, config = keys[ARCHITECTURE], TargetHead.find(target).config
    modules = _rename(build_modules(config).list_tensors())
    matrix = (config.vocab_size, config.hidden_size)
    tensors = {f"blk.{target.num_layers}.{each}": tuple(tensor.shape) for each, tensor in modules.items()}
    tensors |= {"token_embd.weight": matrix, "output_norm.weight": matrix[1:]}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = matrix
    eps, theta = f"{name}.attention.layer_norm_rms_epsilon", f"{name}.rope.freq_base"
    return DraftShape(
        strategy="mtp",
        taps=(),
        hidden_size=keys[f"{name}.embedding_length"],
        head_dim=keys[f"{name}.attention.key_length"],
        num_heads=keys[f"{name}.attention.head_count"],
        num_kv_heads=keys[f"{name}.attention.head_count_kv"],
        intermediate_size=keys.get(f"{name}.feed_forward_length", 0),
        num_layers=1,
        vocab_size=config.vocab_size,
        draft_vocab_size=None,
        rms_norm_eps=shorten(keys[eps]),
        rope={"rope_theta": shorten(keys[theta])},
        options={"keys": dict(sorted(keys.items())), "tensors": tensors},
    )


def _rename(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the layer's tensors under the file's names, norms with one added, and stacked experts' halves apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            found |= {"ffn_gate_exps.weight": gate.contiguous(), "ffn_up_exps.weight": up.contiguous()}
        elif name.endswith("experts.down_proj"):
            found["ffn_down_exps.weight"] = tensor
        else:
            part = _PARTS[name.removesuffix(".weight")]
            found[f"{part}.weight"] = tensor + 1 if tensor.ndim == 1 else tensor
    return found
