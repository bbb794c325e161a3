"""The interface of the readers of exports, by which a gate compares them with our own drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.export.layer_ids import from_format
from draftworks.export.readers.files import DraftVocabulary, ExportFolder
from draftworks.storage.identity import LayerTap

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
