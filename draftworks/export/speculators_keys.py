"""Keys of config.json that speculators and vLLM read for every algorithm, and their reference to the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import is_read, is_served_alone
from draftworks.storage.files import read_json
from draftworks.storage.hub import fetch_hub_file

SPECULATORS_VERSION = "0.9.0"
_METHODS = {"peagle": "eagle3"}
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
    config = {"model": folder, "method": _METHODS.get(algorithm, algorithm), "num_speculative_tokens": tokens}
    arguments = json.dumps(config | ({"parallel_drafting": True} if parallel else {}))
    with_target = {"vLLM, target first": f"vllm serve {locate_model(draft.target)} --speculative-config '{arguments}'"}
    alone = not parallel and is_served_alone(algorithm, is_local=draft.target.revision is None)
    return ({"vLLM": f"vllm serve {folder}"} if alone else {}) | with_target


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of the speculators library, whose class names others use too."""
    return "speculators_model_type" in config
