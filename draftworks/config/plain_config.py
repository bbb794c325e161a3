"""A target's configuration without transformers, where config.json says itself all that the class there would add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftworks.storage.files import read_json

_TYPES = ("llama", "qwen3")
"""Model types whose class in transformers takes these values as the file has them."""
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)
_ROPE = {"rope_type", "rope_theta"}
_BESIDE = {
    *("architectures", "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act"),
    *("initializer_range", "layer_types", "max_window_layers", "mlp_bias", "pad_token_id", "pretraining_tp"),
    *("sliding_window", "transformers_version", "use_cache", "use_sliding_window"),
}
"""Keys that mean nothing to a draft."""


@dataclass(frozen=True)
class PlainConfig:
    """The values of a text model's configuration that drafts are built from, by transformers' names."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]

    def get_text_config(self) -> PlainConfig:
        return self


def read_plain_config(path: Path) -> PlainConfig | None:
    """Return the configuration in a config.json; None if it takes transformers to read it, or to say what is wrong.

    To import a configuration's class takes transformers two seconds: with it come DTensor, sympy and torch's compiler.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not _says_all(found):
        return None
    return PlainConfig(**{each.name: found[each.name] for each in fields(PlainConfig)})


def _says_all(found: Mapping[str, Any]) -> bool:
    """Whether each value is there, valid, and what transformers would make of it, and nothing else is."""
    rope = found.get("rope_parameters")
    return (
        found.get("model_type") in _TYPES
        and found.keys() - _BESIDE == {each.name for each in fields(PlainConfig)}
        and all(type(found[key]) is int and found[key] > 0 for key in _SIZES)
        and found["hidden_size"] % found["num_attention_heads"] == 0
        and type(found["rms_norm_eps"]) is float
        and type(found["tie_word_embeddings"]) is bool
        and isinstance(rope, dict)
        and rope.keys() == _ROPE
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) is float
    )
