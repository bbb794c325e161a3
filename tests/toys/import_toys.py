"""Helpers to spoil an export, as another trainer would have written it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]
EMBEDDING = "embed_tokens.weight"


def changed(
    source: Path,
    folder: Path,
    tensors: Callable[[Tensors], Any] = lambda tensors: None,
    config: Callable[[Config], Any] = lambda config: None,
) -> Path:
    """A copy with other tensors or another config.json, and without provenance, as from another trainer."""
    folder.mkdir()
    weights, values = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    values.pop("provenance", None)
    tensors(weights)
    config(values)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return rename


def layer(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config["transformer_layer_config"].update(values)


def having(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config.update(values)


def nothing(_: Any) -> None:
    return None


def projector(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config["dflash_config"].update(values)


def heads(**values: Any) -> Callable[[Config], Any]:
    """Return a function that sets keys both in `dflash_config` and beside it."""
    return lambda config: [where.update(values) for where in (config, config["dflash_config"])]


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def remove(found: dict[str, Any]) -> None:
        for key in keys:
            del found[key]

    return remove


def learn_embedding(tensors: Tensors) -> None:
    tensors[EMBEDDING] += 0.1 * torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(9))
