"""An exported folder as it is on disk: config.json and the tensors of model.safetensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage.files import read_json, require_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_MISSING = object()


@dataclass(frozen=True)
class ExportFolder:
    """The config and tensors of one exported draft. Whether they are right is judged by the gates, not here."""

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ExportFolder:
        """Read the folder. Raises StoreError if one of the two files is missing or unreadable."""
        try:
            return cls(path, read_json(path / CONFIG), load_file(require_file(path / WEIGHTS)))
        except (OSError, ValueError, SafetensorError) as error:
            raise StoreError(f"{path}: expected {CONFIG} and {WEIGHTS} of one draft: {error}") from error

    def require_setting(self, key: str) -> Any:
        """Return the value of a key; dots lead into nested objects. Raises StoreError if there is none."""
        value = self.find_setting(key, _MISSING)
        if value is _MISSING:
            raise StoreError(f"{self.path / CONFIG}: {key}: expected a value, found none; export the draft again")
        return value

    def find_setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` where it is missing or null."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def cast_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the floating point tensors in `dtype`."""
        return {name: tensor.to(dtype) for name, tensor in self.tensors.items() if tensor.is_floating_point()}


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's ids (V_d,) int64 of the columns of the draft's head, of a target with `size` ids."""

    ids: Tensor
    size: int

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return logits (k, V_d) as log probabilities (k, V) over the target's ids; -inf for ids outside the vocabulary."""
        whole = logits.new_full((len(logits), self.size), -math.inf)
        whole[:, self.ids] = logits.log_softmax(-1)
        return whole


def read_vocabulary(folder: ExportFolder, size: int) -> DraftVocabulary:
    """Return the vocabulary that the offsets in d2t lead to, or all `size` ids where the file has no d2t."""
    offsets = folder.tensors.get("d2t", torch.zeros(size, dtype=torch.int64))
    return DraftVocabulary(offsets + torch.arange(len(offsets)), size)
