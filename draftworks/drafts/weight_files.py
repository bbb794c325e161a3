"""A target's tensors by name, located by the headers of its safetensors files and read one at a time."""

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
from draftworks.errors import StoreError
from draftworks.storage.files import require_file
from draftworks.targets.safetensors_headers import BITS, WEIGHTS, ModelFiles


class WeightFiles(Mapping[str, Path]):
    """The file of each tensor of a target; a file is looked up, and fetched, when one of its tensors is asked for.

    Raises:
        ConfigError: no such directory, or the hub cannot be reached.
        StoreError: a file is missing or damaged.
    """

    def __init__(self, target: TargetFiles) -> None:
        files = ModelFiles(target)
        files.require_folder()
        self._open = cache(_open)  # memory maps; no page is read yet
        self._existing = cache(files.require_file)
        index = files.read_index()
        if index is None:
            index = dict.fromkeys(self._open(files.require_file(WEIGHTS)).keys(), WEIGHTS)
        self._names = index

    def __getitem__(self, name: str) -> Path:
        return self._existing(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def open_tensor(self, name: str) -> Any:
        """Return a lazy tensor, read from the file when it is indexed."""
        try:
            return self._open(self[name]).get_slice(name)
        except SafetensorError as error:
            raise StoreError(f"{self[name]}: {name} is not in this file, but the index says it is: {error}") from error

    def read_rows(self, name: str, row_ids: Tensor) -> Tensor:
        """Return single rows of a matrix; the others are not read."""
        part = self.open_tensor(name)
        return torch.cat([part[number : number + 1] for number in row_ids.tolist()])

    def nbytes(self, name: str) -> int:
        part = self.open_tensor(name)
        return prod(part.get_shape()) * BITS.get(part.get_dtype(), 8) // 8


def _open(path: Path) -> Any:
    try:
        return safe_open(require_file(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path}: not a readable safetensors file ({error}); copy or download it again") from error
