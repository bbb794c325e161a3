"""A target's tensors by name, found by the headers of its safetensors files alone and read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.hub import hub_file
from draftworks.storage.regular_files import read_json

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "I64": 64, "I32": 32, "I16": 16, "F4": 4}


class WeightFiles(Mapping[str, Path]):
    """The file of each tensor of a target, which may be a directory or a hub id at a commit.

    Raises:
        ConfigError: the hub cannot be reached.
        StoreError: a file is missing or damaged.
    """

    def __init__(self, target: TargetFiles) -> None:
        self._target = target
        self._opened = cache(_opened)  # a map of the file each, without its pages
        index = self._path(_INDEX)
        self._files = self._whole() if index is None else self._indexed(index)

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def part(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        try:
            return self._opened(self[name]).get_slice(name)
        except SafetensorError as error:
            raise StoreError(f"{self[name]}: {name} is not here, though the index says so: {error}") from error

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Single rows of a matrix; the others are not read."""
        part = self.part(name)
        return torch.cat([part[number : number + 1] for number in numbers.tolist()])

    def nbytes(self, name: str) -> int:
        part = self.part(name)
        return prod(part.get_shape()) * _BITS.get(part.get_dtype(), 8) // 8

    def _whole(self) -> dict[str, Path]:
        path = self._existing(_WHOLE)
        return dict.fromkeys(self._opened(path).keys(), path)

    def _indexed(self, index: Path) -> dict[str, Path]:
        try:
            files = dict(read_json(index)["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{index}: not a safetensors index: {error!r}") from error
        paths = {name: self._existing(name) for name in sorted(set(files.values()))}
        return {tensor: paths[name] for tensor, name in files.items()}

    def _existing(self, filename: str) -> Path:
        path = self._path(filename)
        if path is None:
            where = f"target {self._target.name} ({self._target.model})"
            raise StoreError(f"{where}: {filename} is missing; weights must be safetensors")
        return path

    def _path(self, filename: str) -> Path | None:
        target = self._target
        if target.revision is not None:
            return hub_file(f"target {target.name}", target.model, target.revision, filename)
        if not Path(target.model).is_dir():
            raise ConfigError(f"target {target.name} ({target.model}): no such directory. Correct `model`")
        path = Path(target.model) / filename
        return path if path.is_file() else None


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path}: not a readable safetensors file ({error}); copy or download it again") from error
