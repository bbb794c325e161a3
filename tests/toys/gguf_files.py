"""Small GGUF files, written by llama.cpp's own library from models of transformers.

Names of tensors are those of its table, and rows of Llama's queries and keys are ordered as its converter orders them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

TINY = Path(__file__).resolve().parents[2] / "registry" / "models" / "tiny"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "vocab_size": 2048,
}
CONFIGS: Mapping[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**{**SIZES, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, **more}),
    "qwen2": lambda **more: Qwen2Config(**{**SIZES, "tie_word_embeddings": False, **more}),
    "qwen3": lambda **more: Qwen3Config(**{**SIZES, "head_dim": 32, "tie_word_embeddings": True, **more}),
    "qwen3moe": lambda **more: Qwen3MoeConfig(
        **{**SIZES, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **more},
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
"""By llama.cpp's architecture: with tied embeddings or a head of its own, heads that are no part of the hidden size."""
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids, their kinds, and merges: by default those of the embedded target."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...]

    @classmethod
    def of_tiny(cls) -> Vocabulary:
        content = json.loads((TINY / "tokenizer.json").read_text())
        vocab = {**content["model"]["vocab"], **{each["content"]: each["id"] for each in content["added_tokens"]}}
        added = {each["content"] for each in content["added_tokens"]}
        tokens = tuple(sorted(vocab, key=vocab.__getitem__))
        merges = tuple(each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"])
        return cls(tokens, tuple(CONTROL if each in added else NORMAL for each in tokens), merges)


def make_model(architecture: str, **config: Any) -> PreTrainedModel:
    """Return a random model whose every weight differs from its neighbours, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](**config), trust_remote_code=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    return model


@dataclass(frozen=True)
class GgufFile:
    """What is written into a file. `metadata` replaces or, with None, removes keys; `tensors` are written beside the model's."""

    architecture: str = "llama"
    model: PreTrainedModel | None = None
    packing: str = "F32"
    pre: str | None = "smollm"
    vocabulary: Vocabulary = field(default_factory=Vocabulary.of_tiny)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        model = self.model or make_model(self.architecture)
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in {**self.describe(model.config), **self.metadata}.items():
            if value is not None:
                _add(writer, key, value)
        for name, content in {**dict(name_tensors(self.architecture, model)), **self.tensors}.items():
            kind = gguf.GGMLQuantizationType[self.packing if content.ndim > 1 else "F32"]
            plain = kind == gguf.GGMLQuantizationType.F32
            writer.add_tensor(
                name, content if plain else gguf.quantize(content, kind), raw_dtype=None if plain else kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def describe(self, config: Any) -> dict[str, Any]:
        """Return the metadata that llama.cpp's converter writes."""
        words, sizes = self.vocabulary, f"{self.architecture}."
        found = {
            f"{sizes}block_count": config.num_hidden_layers,
            f"{sizes}context_length": config.max_position_embeddings,
            f"{sizes}embedding_length": config.hidden_size,
            f"{sizes}feed_forward_length": config.intermediate_size,
            f"{sizes}attention.head_count": config.num_attention_heads,
            f"{sizes}attention.head_count_kv": config.num_key_value_heads,
            f"{sizes}attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            f"{sizes}rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": list(words.tokens),
            "tokenizer.ggml.token_type": list(words.kinds),
            "tokenizer.ggml.merges": list(words.merges),
            "tokenizer.ggml.eos_token_id": words.tokens.index("<|im_end|>"),
            "tokenizer.chat_template": TEMPLATE,
        }
        if self.architecture.startswith("qwen3"):
            found |= {
                f"{sizes}attention.key_length": config.head_dim,
                f"{sizes}attention.value_length": config.head_dim,
            }
        if self.architecture == "qwen3moe":
            found[f"{sizes}expert_count"] = config.num_experts
            found[f"{sizes}expert_used_count"] = config.num_experts_per_tok
            found[f"{sizes}expert_feed_forward_length"] = config.moe_intermediate_size
        return found


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def name_tensors(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the model's weights under llama.cpp's names and in its order of rows."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        content = weight.numpy()
        if name.endswith("mlp.experts.gate_up_proj"):  # transformers keeps both in one, in memory
            block = name.split(".")[2]
            gate, up = np.split(content, 2, axis=1)
            found |= {f"blk.{block}.ffn_gate_exps.weight": gate.copy(), f"blk.{block}.ffn_up_exps.weight": up.copy()}
            continue
        if name.endswith("mlp.experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = content
            continue
        stem, _, kind = name.rpartition(".")
        ours = f"{names.get_name(stem)}.{kind}"
        count = next((each for part, each in heads.items() if f".{part}" in ours), None)
        if architecture == "llama" and count is not None:
            content = interleave_halves(content, count)
        found[ours] = content
    return found


def interleave_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of LlamaModel in llama.cpp's convert_hf_to_gguf.py."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
