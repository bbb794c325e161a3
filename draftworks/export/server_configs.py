"""Build the configuration classes by which servers read an exported config.json, to see whether they accept it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from draftworks.errors import ConfigError

LAYER_CONFIG = "transformer_layer_config"
"""Key of the draft's layer configuration in speculators' format."""
ELSEWHERE = {"sglang": "not run: make test-sglang", "speculators": "not run: make test-speculators"}
"""Libraries whose classes need an environment of their own, with the text that is reported for them."""


def build_server_configs(config: Mapping[str, Any]) -> dict[str, str]:
    """Return, by library, the classes that accept this config.json, or that the library was not run.

    Every server reads drafts with transformers' classes or with classes derived from them.

    Raises:
        ConfigError: a class refuses the configuration, or there is none for its model_type.
    """
    parts = {"config.json": config, LAYER_CONFIG: config.get(LAYER_CONFIG)}
    built = [_build_config(where, part) for where, part in parts.items() if part and "model_type" in part]
    accepted = (
        f"{', '.join(built)} of {version('transformers')}" if built else "not run: config.json names no model_type"
    )
    return {"transformers": accepted, **ELSEWHERE}


def _build_config(where: str, part: Mapping[str, Any]) -> str:
    from transformers import AutoConfig

    heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}: no server can group them"
        )
    try:
        return type(AutoConfig.for_model(**part)).__name__
    except Exception as error:  # every class has its own ways to refuse
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"{where}: transformers cannot build a configuration of model_type {part['model_type']!r} from it: {reason}"
        ) from error
