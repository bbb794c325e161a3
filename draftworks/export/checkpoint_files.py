"""Read a checkpoint folder of other software: config.json, and safetensors in one file or in shards. No pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage.files import read_json, require_file
from draftworks.storage.words import list_names

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """The config and all tensors of a checkpoint folder."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder. Raises StoreError for files that are missing, damaged, or contradict the index."""
    config = read_object(folder / CONFIG)
    if not (folder / INDEX).exists():
        return Checkpoint(folder, config, _read(folder / WEIGHTS))
    shard_of = read_object(folder / INDEX).get("weight_map")
    if not isinstance(shard_of, dict):
        raise StoreError(f"{folder / INDEX}: not a safetensors index: weight_map is missing")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(map(str, shard_of.values()))):
        if Path(shard).name != shard or "\0" in shard:
            raise StoreError(f"{folder / INDEX}: {shard!r} is not the name of a file in this folder")
        tensors |= _read(folder / shard)
    differing = sorted(tensors.keys() ^ shard_of.keys())
    if differing:
        raise StoreError(
            f"{folder / INDEX}: the index and its files do not hold the same tensors: {list_names(differing)}"
        )
    return Checkpoint(folder, config, tensors)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises StoreError if the file is missing, unreadable or something else."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise StoreError(f"{path.parent}: {path.name} is missing: not the folder of a model") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(require_file(path))
    except FileNotFoundError:
        others = sorted(found.name for found in path.parent.glob("*.bin")) + sorted(
            found.name for found in path.parent.glob("*.pt")
        )
        hint = f"; {', '.join(others)} would have to be unpickled, which Draftworks never does" if others else ""
        raise StoreError(f"{path}: missing{hint}. Weights must be safetensors") from None
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{path}: weights cannot be read: {error}. Copy or download them again") from error
