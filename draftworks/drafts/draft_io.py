"""A draft on disk: model.safetensors with its weights in fp32, config.json with its identity and options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from draftworks.config.draft_options import CONFIG, WEIGHTS, DraftConfig, read_draft_config
from draftworks.config.strategies import resolve_strategy
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.artifacts import FileManifest
from draftworks.storage.files import publish_file, publish_json, require_file
from draftworks.storage.identity import file_digest


def save_draft(
    folder: Path,
    strategy: DraftStrategy,
    target_digest: str,
    weights: Mapping[str, Tensor] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> DraftConfig:
    """Write the draft into `folder`, each file atomically, config.json last.

    Args:
        weights: the whole state of `strategy.model`; needed where the model holds only a shard of it.
    """
    state = strategy.model.state_dict() if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    with publish_file(folder / WEIGHTS) as staging:
        staging.write_bytes(save({name: _to_fp32_on_cpu(tensor) for name, tensor in state.items()}))
    config = DraftConfig(
        strategy=strategy.name,
        draft=_as_json(strategy.config()),
        target_digest=target_digest,
        weights_digest=file_digest(folder / WEIGHTS),
        provenance=_as_json(dict(provenance or {})),
    )
    publish_json(folder / CONFIG, asdict(config))
    return config


def load_draft(folder: Path, strategy: DraftStrategy, target_digest: str | None, to_train: bool = False) -> DraftConfig:
    """Load the weights into `strategy.model`, which must not be wrapped yet.

    Args:
        target_digest: the target that the draft must have been trained for; None accepts a draft of any target of this
            shape, to measure it on other weights.
        to_train: require only the options that decide what a draft computes, not those of its training.

    Raises:
        StoreError: the draft is of another strategy, target or configuration, a file is missing or altered, or tensors
            are missing, unexpected or of another shape. The model is unchanged.
    """
    config = read_draft_config(folder)
    _require(folder / CONFIG, "strategy", strategy.name, config.strategy)
    if target_digest is not None:
        _require(folder / CONFIG, "target digest", target_digest, config.target_digest)
    expected, found = _as_json(strategy.config()), _with_defaults(config.draft, strategy.name, folder / CONFIG)
    if to_train:
        expected, found = _structure(expected, strategy.name), _structure(found, strategy.name)
    for key in sorted(expected.keys() | found.keys()):
        _require(folder / CONFIG, f"draft.{key}", expected.get(key), found.get(key))
    FileManifest.of_digests({WEIGHTS: config.weights_digest}).require_intact(folder, "Train the draft again")
    load_weights(folder / WEIGHTS, strategy.model)
    return config


def _with_defaults(draft: dict[str, Any], strategy: str, path: Path) -> dict[str, Any]:
    """Fill in defaults of options that the strategy gained after the draft was saved, so that old drafts still load."""
    try:
        options = resolve_strategy(strategy).parse_options(draft.get("options", {}), where=f"{path}: options")
    except ConfigError as error:
        raise StoreError(f"{error}. Train the draft again") from error
    return {**draft, "options": _as_json(options.to_identity())}


def _structure(draft: dict[str, Any], strategy: str) -> dict[str, Any]:
    options = resolve_strategy(strategy).parse_options(draft.get("options", {}), where=f"options of {strategy}")
    return {**draft, "options": options.select_structural()}


def load_weights(path: Path, model: nn.Module) -> None:
    """Load a weight file that has been verified into a model that is not wrapped yet.

    Raises:
        StoreError: unreadable, or tensors are missing, unexpected or of another shape. The model is unchanged.
    """
    weights = read_weights(path)
    _require_same_tensors(path, model.state_dict(), weights)
    model.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file. Raises StoreError."""
    try:
        return load_file(require_file(path))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: weights cannot be read ({error}). Train the draft again") from error


def _require_same_tensors(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise StoreError(f"{path}: missing tensors: {missing or 'none'}; unexpected tensors: {unexpected or 'none'}")
    for name, tensor in expected.items():
        _require(path, f"shape of {name}", tuple(tensor.shape), tuple(found[name].shape))


def _require(path: Path, what: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise StoreError(f"{path}: {what}: expected {expected}, found {found}")


def _to_fp32_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).contiguous()


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value as it is read back from JSON, so that tuples and lists compare equal."""
    return json.loads(json.dumps(value, allow_nan=False))
