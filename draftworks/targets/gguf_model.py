"""What a GGUF file's model is in transformers' terms: its config.json, and the name and form of each tensor. Torch-free.

llama.cpp's converter (`convert_hf_to_gguf.py`) renames tensors and orders the rows of Llama's queries and keys for its own
rope; both are undone here. Whatever the file says that no field here stands for is refused by name, never left out.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError
from draftworks.storage.files import open_regular
from draftworks.storage.words import list_names
from draftworks.targets.gguf_header import GgufHeader, GgufTensor, read_gguf_metadata

_ARCHITECTURE = "general.architecture"
_SHOWN = 3
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Names of the tensors of a model, and of those of a layer, without `.weight`; `{}` is the number of an expert."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"
"""What each frequency of the rope is divided by: how a file says that its rope is scaled as Llama 3.1's."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of the scaled rope of Llama 3.1 to 3.3, which differ in `factor` alone."""
WEIGHT_BYTES = 4
"""Of a weight in single precision, in which a file is dequantised: nothing that the file holds is rounded."""
READABLE = frozenset(
    (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("TQ1_0", "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL"),
        "IQ4_XS",
    )
)
"""Kinds of tensors that the package `gguf` 0.17 and later dequantises."""


@dataclass(frozen=True)
class GgufSizes:
    """Sizes of a file's model."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    context: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, and what it is in transformers' files.

    Attributes:
        names: one, or one for each slice of the outermost dimension: experts, which transformers' files have one by one.
        heads: heads whose rows are in llama.cpp's order of the rope, 0 if none are.
    """

    source: GgufTensor
    names: tuple[str, ...]
    heads: int = 0


@dataclass(frozen=True)
class GgufModel:
    """A file's model: its config.json, and its tensors in the file's order."""

    config: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class _Family:
    """How an architecture of llama.cpp is one of transformers.

    Attributes:
        inner: names of a layer's tensors.
        rope_order: whether rows of queries and keys are in llama.cpp's order.
        complete: returns fields of config.json that only this family has.
    """

    model_type: str
    model_class: str
    inner: Mapping[str, str]
    rope_order: bool = False
    complete: Callable[[_Fields], dict[str, Any]] = lambda fields: {}


class _Fields:
    """Metadata of a file's model, below the name of its architecture."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path, self._metadata = path, metadata
        self.architecture = metadata.get(_ARCHITECTURE)

    def find(self, name: str) -> Any:
        return self._metadata.get(f"{self.architecture}.{name}")

    def require(self, name: str, kind: type = int, default: Any = None) -> Any:
        found = self.find(name)
        if found is None:
            found = default
        if not isinstance(found, kind) or isinstance(found, bool) or (kind is int and not 0 < found < 1 << 40):
            told = "nothing" if found is None else f"{found!r:.60}"
            raise ConfigError(f"{self._path}: {self.architecture}.{name}: expected one {kind.__name__}, found {told}")
        return found

    def count_vocabulary(self) -> int:
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        return self.require("vocab_size", default=len(tokens) if isinstance(tokens, list) else tokens)

    def read_sizes(self) -> GgufSizes:
        return GgufSizes(
            num_layers=self.require("block_count"),
            hidden_size=self.require("embedding_length"),
            vocab_size=self.count_vocabulary(),
            context=self.require("context_length"),
        )


def _complete_experts(fields: _Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.require("expert_count"),
        "num_experts_per_tok": fields.require("expert_used_count"),
        "moe_intermediate_size": fields.require("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp normalises the chosen experts' weights (src/models/qwen3moe.cpp)
    }


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", _INNER, rope_order=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _INNER),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", {**_INNER, **_QK_NORMS}),
    "qwen3moe": _Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**_INNER, **_QK_NORMS, **_EXPERTS}, complete=_complete_experts
    ),
}


def read_gguf_sizes(path: Path) -> GgufSizes:
    """Return the sizes of a file's model from the beginning of its metadata.

    Raises:
        StoreError: the file cannot be read.
        ConfigError: its architecture is not known here, or it gives no sizes.
    """

    def has_sizes(metadata: Mapping[str, Any]) -> bool:
        try:
            _Fields(path, metadata).read_sizes()
        except ConfigError:
            return False
        return True

    metadata = read_gguf_metadata(path, has_sizes)
    _require_family(path, metadata.get(_ARCHITECTURE))
    return _Fields(path, metadata).read_sizes()


def describe_model(header: GgufHeader) -> GgufModel:
    """Return what the file's model is in transformers' terms.

    Raises:
        ConfigError: its architecture, a form of it, or the kind of a tensor is not known here, or a field is absent.
    """
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ConfigError(
            f"{header.path}: is one of {parts} parts: merge them by llama-gguf-split --merge, and give that file"
        )
    family = _require_family(header.path, header.architecture)
    fields = _Fields(header.path, header.metadata)
    _require_readable(header)
    config = _make_config(header, family, fields)
    heads = (
        {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if family.rope_order else {}
    )
    tensors = []
    strange: list[str] = []
    for each in header.tensors:
        if each.name == ROPE_FACTORS:
            continue
        names = _find_names(each, family)
        if not names:
            strange.append(each.name)
        tensors.append(StoredTensor(each, names, heads.get(_find_part(each.name), 0)))
    if strange:
        raise ConfigError(
            f"{header.path}: {len(strange)} tensors that a {family.model_class} of transformers does not have: "
            f"{list_names(strange, _SHOWN)}. Give a folder with the safetensors of this model"
        )
    return GgufModel(config, tuple(tensors))


def _require_family(path: Path, architecture: Any) -> _Family:
    if architecture not in _FAMILIES:
        raise ConfigError(
            f"{path}: architecture {architecture!r:.40} is not read from GGUF files, {', '.join(_FAMILIES)} are. Give a "
            "folder with the safetensors of this model"
        )
    return _FAMILIES[architecture]


def _require_readable(header: GgufHeader) -> None:
    unread = [each for each in header.tensors if each.packing is None or each.packing.name not in READABLE]
    if unread:
        kind = f"type {unread[0].kind}" if unread[0].packing is None else unread[0].packing.name
        raise ConfigError(
            f"{header.path}: {len(unread)} tensors cannot be dequantised, such as {unread[0].name} of {kind}: expected "
            "one of Q4_0 to Q8_0, Q2_K to Q6_K, IQ1 to IQ4, TQ1_0, TQ2_0, MXFP4, F16, BF16, F32"
        )


def _make_config(header: GgufHeader, family: _Family, fields: _Fields) -> dict[str, Any]:
    sizes, heads = fields.read_sizes(), fields.require("attention.head_count")
    head_dim = fields.require("attention.key_length", default=sizes.hidden_size // heads)
    _require_plain_attention(header, family, fields, head_dim)
    names = {each.name for each in header.tensors}
    ids = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()}
    return {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "dtype": "float32",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": fields.require("feed_forward_length"),
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.require("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": shorten(fields.require("attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _make_rope(header, fields, head_dim),
        "tie_word_embeddings": "output.weight" not in names,
        **({"attention_bias": "blk.0.attn_q.bias" in names} if family.model_type != "qwen2" else {}),
        **({"mlp_bias": "blk.0.ffn_gate.bias" in names} if family.model_type == "llama" else {}),
        **ids,
        **family.complete(fields),
    }


_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _require_plain_attention(header: GgufHeader, family: _Family, fields: _Fields, head_dim: int) -> None:
    """Raise ConfigError for what llama.cpp reads and the family of transformers does not have."""
    if family.complete is not _complete_experts and fields.find("expert_count"):
        raise ConfigError(
            f"{header.path}: an architecture {header.architecture} with experts is not read from GGUF files"
        )
    value = fields.find("attention.value_length")
    if value not in (None, head_dim):
        raise ConfigError(f"{header.path}: keys have {head_dim} numbers a head and values {value}: expected as many")
    turned = fields.find("rope.dimension_count")
    if turned not in (None, head_dim):
        raise ConfigError(f"{header.path}: rope.dimension_count {turned}: expected all {head_dim} of a head")


def _make_rope(header: GgufHeader, fields: _Fields, head_dim: int) -> dict[str, Any]:
    theta = shorten(fields.require("rope.freq_base", float, 10000.0))
    kind = fields.find("rope.scaling.type")
    factors = next((each for each in header.tensors if each.name == ROPE_FACTORS), None)
    if kind == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": fields.require("rope.scaling.factor", float)}
    if kind not in (None, "none", "") and factors is None:
        raise ConfigError(
            f"{header.path}: a rope scaled as {kind!r:.20} is not read from GGUF files. Give a folder with the safetensors"
        )
    if factors is None:
        return {"rope_theta": theta, "rope_type": "default"}
    found = _read_floats(header.path, factors)
    expected = _compute_llama3_factors(theta, head_dim, max(found))
    if len(found) != len(expected) or not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(found, expected)):
        raise ConfigError(
            f"{header.path}: its rope is scaled by {ROPE_FACTORS}, in another way than Llama 3.1's. Give a folder with the "
            "safetensors"
        )
    return {"rope_theta": theta, "rope_type": "llama3", "factor": round(max(found), 4), **_LLAMA3}


def _compute_llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Return the divisor of each frequency of a rope scaled as Llama 3.1's (`_compute_llama3_parameters` of transformers)."""
    low, high, original = _LLAMA3.values()
    divisors = []
    for number in range(head_dim // 2):
        turns = original * theta ** (-2 * number / head_dim) / (2 * math.pi)
        smooth = (turns - low) / (high - low)
        divisors.append(
            1 / ((1 - smooth) / factor + smooth) if low <= turns <= high else 1.0 if turns > high else factor
        )
    return divisors


def _read_floats(path: Path, tensor: GgufTensor) -> list[float]:
    if tensor.packing is None or tensor.packing.name != "F32" or tensor.nbytes > 1 << 20:
        raise ConfigError(f"{path}: {tensor.name}: expected a few numbers of type F32")
    with open_regular(path) as stream:
        stream.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.nbytes // 4}f", stream.read(tensor.nbytes)))


def _find_part(name: str) -> str:
    """Return what a layer's tensor is, such as attn_q; its whole name if it is of no layer."""
    block = _BLOCK.fullmatch(name)
    return (name if block is None else block[2]).rpartition(".")[0]


def _find_names(tensor: GgufTensor, family: _Family) -> tuple[str, ...]:
    block, kind = _BLOCK.fullmatch(tensor.name), tensor.name.rpartition(".")[2]
    name = (_OUTER if block is None else family.inner).get(_find_part(tensor.name))
    if name is None or kind not in ("weight", "bias"):
        return ()
    whole = f"{name}.{kind}" if block is None else f"model.layers.{block[1]}.{name}.{kind}"
    return tuple(whole.format(number) for number in range(tensor.shape[0])) if "{}" in whole else (whole,)


def shorten(value: float) -> float:
    """Return the number with the fewest digits that is the same in single precision: 1e-05, not 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def count_bytes(model: GgufModel) -> int:
    """Return the bytes that the model's weights take in single precision."""
    return sum(WEIGHT_BYTES * math.prod(each.source.shape) for each in model.tensors)
