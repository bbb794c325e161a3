"""The interface of the readers of exports, by which a gate compares them with our drafter; and an exported folder on disk."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.export.conventions import from_format
from draftworks.storage.files import read_json, require_file
from draftworks.storage.identity import LayerTap

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
        if key in self.config:  # GGUF's keys have dots of their own
            return default if self.config[key] is None else self.config[key]
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


Features = Mapping[str, Tensor] | Tensor


@dataclass(frozen=True)
class TargetTensors:
    """The target's embedding and head, (V, H) each, which a server lends the draft.

    Attributes:
        embedding_scale: by what the target multiplies looked-up embeddings. A draft that calls the target's embedding
            module gets scaled ones, a draft that takes its matrix does not.
    """

    embedding: Tensor = field(repr=False)
    head: Tensor = field(repr=False)
    embedding_scale: float = 1.0


class ExportReader(ABC):
    """A draft as a server runs it, computed from the exported files alone, plainly and slowly.

    It shares no code with what trains, serves or writes the draft, so it is the reference of their tests too. It computes
    what the files say and checks nothing: wrong files are for the gates.

    Attributes:
        taps: in the order of the columns of `fc`, which is that of the config.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype

    @abstractmethod
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Return the logits of a proposal, (k, V_d). Arguments as for `log_probabilities`. Autograd may record it."""

    @torch.no_grad()
    def log_probabilities(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Return the distributions of a proposal at temperature 1.

        Args:
            features: the target's streams at positions 0 … n-1: by name of the tap, (n, H) each, or side by side in the
                order of `taps`, (n, taps · H).
            next_tokens: (n,) int64, the token after each of these positions.
            drawn: (k,) int64, the proposed tokens as ids of the target. Step i knows those before i.

        Returns:
            (k, V): row i is the distribution of step i; -inf for tokens outside the draft's vocabulary.
        """
        return self.vocabulary.log_probabilities(self.logits(features, next_tokens, drawn))

    def join_taps(self, features: Features) -> Tensor:
        """Return the columns that `fc` reads, (n, taps · H). Raises StoreError for taps that the target does not have."""
        if not isinstance(features, Tensor):
            missing = [tap.name for tap in self.taps if tap.name not in features]
            if missing:
                known = ", ".join(features)
                raise StoreError(f"layer ids of the export lead to {', '.join(missing)}: expected some of {known}")
            features = torch.cat([features[tap.name] for tap in self.taps], dim=-1)
        return features.to(self.dtype)


def read_taps(folder: ExportFolder, export_format: str, key: str) -> tuple[LayerTap, ...]:
    """Return the taps that the layer ids under `key` name. Raises ConfigError for ids that name none."""
    return from_format(export_format, folder.require_setting(key))
