"""Keys of an exported config.json: of a decoder layer in all formats, and those that speculators and vLLM read for every algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import SERVER_COMMANDS, is_read, is_served_alone
from draftworks.export.export_format import DraftShape, Shapes
from draftworks.storage.files import read_json
from draftworks.storage.hub import fetch_hub_file

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


SPECULATORS_VERSION = "0.9.0"
_METHODS = {"peagle": "eagle3", "dflash2": "dflash"}
"""vLLM's `method` of a type, where it has another name."""


def build_speculators_keys(algorithm: str, target: TargetFiles, tokens: int) -> dict[str, Any]:
    """Return the keys that speculators and vLLM read first: the algorithm, and the target to load with the draft."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": locate_model(target), "architectures": read_architectures(target)},
        },
    }


def locate_model(target: TargetFiles) -> str:
    """Return the target's hub id, or the absolute path of its directory."""
    return target.model if target.revision is not None else str(Path(target.model).resolve())


def read_architectures(target: TargetFiles) -> list[str]:
    """Return `architectures` of the target's config.json. Raises StoreError if it cannot be read."""
    if target.revision is None:
        path: Path | None = Path(target.model) / "config.json"
    else:
        path = fetch_hub_file(f"target {target.name}", target.model, target.revision, "config.json")
    try:
        return list(read_json(path).get("architectures") or []) if path else []
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise StoreError(f"{path}: the config of target {target.name} cannot be read: {error}") from error


def read_proposed_tokens(config: Mapping[str, Any], where: str) -> int:
    """Return the number of tokens that servers are to ask for. Raises ConfigError if config.json does not have it."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    if not isinstance(tokens, int):
        raise ConfigError(
            f"{where}: speculators_config.proposal_methods: expected a method with its number of speculative_tokens first, "
            f"found {methods[0]}"
        )
    return tokens


def build_vllm_commands(
    draft: CanonicalDraft, folder: str, algorithm: str, tokens: int, parallel: bool = False
) -> dict[str, str]:
    """Return vLLM's command lines that all known releases take: with target and draft, and with the draft's folder alone.

    None for a type that one of them refuses, and the second only where none wants the target on a hub (see `vllm_releases`).

    Args:
        algorithm: `speculators_model_type` of the draft.
        parallel: whether the draft proposes its tokens in one pass, which is not part of vLLM's method. There is no command
            with such a draft alone: as a user of 0.28 reports, that one takes it for a plain language model and stops.
    """
    if not is_read(algorithm):
        return {}
    alone = not parallel and is_served_alone(algorithm, is_local=draft.target.revision is None)
    with_target = build_vllm_command(draft, folder, _METHODS.get(algorithm, algorithm), tokens, parallel)
    return ({"vLLM": f"vllm serve {folder}"} if alone else {}) | with_target


def build_vllm_command(
    draft: CanonicalDraft, folder: str, method: str, tokens: int, parallel: bool = False
) -> dict[str, str]:
    """Return vLLM's command line with target and draft, by its name.

    Args:
        method: vLLM's name for the way of drafting, which it would else guess by words in the path of the draft.
        parallel: see `build_vllm_commands`.
    """
    config = {"model": folder, "method": method, "num_speculative_tokens": tokens}
    arguments = json.dumps(config | ({"parallel_drafting": True} if parallel else {}))
    return {SERVER_COMMANDS["vllm"]: f"vllm serve {locate_model(draft.target)} --speculative-config '{arguments}'"}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of the speculators library, whose class names others use too."""
    return "speculators_model_type" in config
