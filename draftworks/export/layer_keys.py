"""Write and read the keys of config.json that describe a decoder layer in all formats: sizes, and rope in both spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import DraftShape, Shapes

_OUTSIDE_SCALING = ("rope_theta", "partial_rotary_factor")
"""Rope parameters that transformers 4 keeps beside `rope_scaling`, not in it."""


def build_layer_keys(draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keys for sizes, activation, rope and dtype of the draft's layers, as transformers names them."""
    config = draft.config
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_kv_heads"],
        "head_dim": config["head_dim"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        **build_rope_keys(config["rope_parameters"]),
        **build_dtype_keys(dtype),
    }


def build_dtype_keys(dtype: torch.dtype) -> dict[str, str]:
    """Return the dtype under the key of transformers 5 and that of version 4."""
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def build_rope_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters in the spelling of transformers 5 and in that of version 4: a server reads the one it knows."""
    scaling = {name: value for name, value in rope.items() if name not in _OUTSIDE_SCALING}
    plain = rope.get("rope_type", "default") == "default"
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else scaling,
    }


def read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the rope parameters of a config.json, in either spelling, in that of transformers 5.

    Raises:
        ConfigError: none, or two that contradict each other.
    """
    new, theta = config.get("rope_parameters"), config.get("rope_theta")
    if not new and theta is None:
        raise ConfigError(
            f"{where}: neither rope_parameters nor rope_theta: the draft's rotary positions are not known"
        )
    old = {"rope_type": "default", "rope_theta": theta, **(config.get("rope_scaling") or {})}
    if "type" in old:
        old["rope_type"] = old.pop("type")
    if not new:
        return old
    found = {"rope_type": "default", "rope_theta": theta, **new}
    contradicting = [key for key in old if theta is not None and old[key] != found.get(key)]
    if contradicting:
        raise ConfigError(
            f"{where}: rope_parameters {new} and rope_theta, rope_scaling {theta}, {config.get('rope_scaling')} "
            f"contradict each other in {', '.join(contradicting)}"
        )
    return found


def require(config: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a key. Raises ConfigError if there is none."""
    if config.get(key) is None:
        raise ConfigError(f"{where}: key {key} is missing")
    return config[key]


def read_layer_sizes(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what `build_layer_keys` writes as fields of a `DraftShape`.

    Raises:
        ConfigError: a key is missing, or an activation other than silu, or a bias.
    """
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{where}: hidden_act {activation!r}: drafts here compute silu")
    biased = [key for key in ("attention_bias", "mlp_bias", "bias") if config.get(key)]
    if biased:
        raise ConfigError(f"{where}: {', '.join(biased)}: drafts here have no biases")
    heads, hidden = require(config, "num_attention_heads", where), require(config, "hidden_size", where)
    return {
        "hidden_size": hidden,
        "head_dim": config.get("head_dim") or hidden // heads,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": require(config, "intermediate_size", where),
        "num_layers": require(config, "num_hidden_layers", where),
        "vocab_size": require(config, "vocab_size", where),
        "rms_norm_eps": require(config, "rms_norm_eps", where),
        "rope": read_rope(config, where),
    }


def list_layer_tensors(prefix: str, shape: DraftShape, inputs: int) -> Shapes:
    """Return names and shapes of the tensors of one Llama layer whose q, k and v projections have `inputs` columns.

    Args:
        prefix: of the names, with the dot.
    """
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (queries, inputs),
        f"{prefix}self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}mlp.up_proj.weight": (wide, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, wide),
    }
