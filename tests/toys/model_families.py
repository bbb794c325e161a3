"""A tiny random model of each family that targets come from, in a folder as transformers saves it, with the tokenizer of `tiny`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from strategy_cases import find_cases, list_options
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from draftworks.config.run_files import TargetFiles
from draftworks.targets.resolve import digest_target_files

VOCAB, HIDDEN, LAYERS, CONTEXT = 2048, 32, 6, 256
TOKENIZER = Path(__file__).resolve().parents[2] / "registry" / "models" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_HYBRID = ["linear_attention", "linear_attention", "full_attention"] * 2
_ALTERNATING = ["sliding_attention", "full_attention"] * 3
_TEXT = {
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0},
    "initializer_range": 0.15,
}
_DENSE = {**_TEXT, "head_dim": 16, "intermediate_size": 48}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET = {
    **{
        "layer_types": _HYBRID,
        "full_attention_interval": 3,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_MROPE = {
    **{"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
_QWEN_VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": HIDDEN},
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_GEMMA = {**_DENSE, "layer_types": _ALTERNATING, "sliding_window": 16, "query_pre_attn_scalar": 16}
_SIGLIP = {
    **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}

TAPS = [2, 3, 4]
_BLOCKS = {"block_size": 4, "num_layers": 1, "num_anchors": 16, "layer_ids": TAPS, "mask_token_id": 3}
DRAFT_OPTIONS = {
    name: {**list_options(name, _BLOCKS), **cases.exported, "layer_ids": TAPS} for name, cases in find_cases().items()
}
"""A small draft of each strategy that trains for any target. (MTP is for those with a layer of their own: see mtp_toys.)"""
for _options in DRAFT_OPTIONS.values():
    _options.update({"draft_vocab_size": 64} if "draft_vocab_size" in _options else {})


@dataclass(frozen=True)
class Family:
    """How a model of one family is made.

    Attributes:
        model: class of transformers that saves it, as checkpoints of the family are saved.
        config: of that class, with `model_type`.
        beside: shapes of tensors that published checkpoints hold and no causal language model loads: layers that
            predict further tokens.
    """

    model: str
    config: Mapping[str, Any]
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def _qwen3_5(text: Mapping[str, Any], model: str) -> Family:
    kind = "qwen3_5_moe" if "num_experts" in text else "qwen3_5"
    config = {"text_config": dict(text), "vision_config": _QWEN_VISION, **_QWEN_TOKENS}
    beside = {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.norm.weight": (HIDDEN,)}
    return Family(model, {"model_type": kind, **config}, beside)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {
            "model_type": "llama",
            **_TEXT,
            "intermediate_size": 48,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            },
        },
    ),
    "qwen3": Family("Qwen3ForCausalLM", {"model_type": "qwen3", **_DENSE, "tie_word_embeddings": True}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", **_DENSE, **_EXPERTS}),
    "mistral": Family("MistralForCausalLM", {"model_type": "mistral", **_DENSE, "sliding_window": 16}),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            **{"model_type": "qwen3_next", **_DENSE, **_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 24},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.norm.weight": (HIDDEN,)},
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", {"model_type": "qwen3_5_text", **_DENSE, **_DELTA_NET, "rope_parameters": _MROPE}
    ),
    "qwen3_5": _qwen3_5({**_DENSE, **_DELTA_NET, "rope_parameters": _MROPE}, "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": _qwen3_5(
        {
            **{**_TEXT, "head_dim": 16, **_EXPERTS, "shared_expert_intermediate_size": 24, **_DELTA_NET},
            "rope_parameters": _MROPE,
        },
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "gemma3_text": Family("Gemma3ForCausalLM", {"model_type": "gemma3_text", **_GEMMA}),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        {
            **{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **_GEMMA}},
            **{"vision_config": _SIGLIP, "mm_tokens_per_image": 4},
            **{"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **{"model_type": "gpt_oss", **_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"layer_types": _ALTERNATING, "sliding_window": 16, "num_attention_heads": 6},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"truncate": False, "original_max_position_embeddings": 64},
            },
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **{"model_type": "deepseek_v3", **_TEXT, "num_key_value_heads": 4, "intermediate_size": 48},
            **{"moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
            **{
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
            },
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
            },
        },
        {
            f"model.layers.{LAYERS}.embed_tokens.weight": (VOCAB, HIDDEN),
            f"model.layers.{LAYERS}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
            f"model.layers.{LAYERS}.shared_head.head.weight": (VOCAB, HIDDEN),
        },
    ),
}


def save_family(name: str, folder: Path, **changes: Any) -> TargetFiles:
    """Write a model of the family with weights of its own, far enough from their start that a forgotten norm shows.

    Args:
        changes: of its config.
    """
    family = replace(FAMILIES[name], config={**FAMILIES[name].config, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    model = _random_model(family)
    model.save_pretrained(folder)
    if family.beside:
        _add_tensors(folder, family.beside)
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, folder / file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    return digest_target_files(
        TargetFiles(
            name=name,
            model=str(folder),
            tokenizer=str(folder),
            digest="",
            tokenizer_digest="",
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            context=CONTEXT,
        )
    )


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself. Grouped products of experts know no float64, so these are done one by one."""
    if hasattr(model.config.get_text_config(), "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.double()


def _random_model(family: Family) -> PreTrainedModel:
    """Its weights depend on nothing but the family."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, family.model)(AutoConfig.for_model(**family.config)).eval()
        with torch.no_grad():
            for parameter_name, weight in model.named_parameters():
                if weight.ndim == 1 and "norm" in parameter_name:
                    weight.add_(0.3 * torch.randn_like(weight))
                elif weight.ndim == 1 and ("bias" in parameter_name or "sinks" in parameter_name):
                    weight.normal_(std=0.3)
    return model


def _add_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """In a second file with an index, as in checkpoints of many files."""
    first, second, index = "model.safetensors", "model-mtp.safetensors", "model.safetensors.index.json"
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, Tensor] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / second, metadata={"format": "pt"})
    with safe_open(folder / first, framework="pt") as stream:
        weight_map = dict.fromkeys(stream.keys(), first)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map | dict.fromkeys(tensors, second)}))
