"""What every reader of an export offers, so that a gate can ask it what our own draft was asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.errors import ConfigError, StoreError
from draftworks.export.layer_ids import from_format
from draftworks.export.readers.files import CONFIG, DraftVocabulary, Expected, ExportFolder
from draftworks.export.readers.sizes import LayerSizes
from draftworks.storage.identity import LayerTap

Features = Mapping[str, Tensor] | Tensor


@dataclass(frozen=True)
class TargetTensors:
    """What a server lends the draft: the target's embedding and head, (V, H) each.

    Attributes:
        embedding_scale: by what the target multiplies the rows that it looks up. Who asks the target's module to embed gets
            it too, who takes its matrix does not.
    """

    embedding: Tensor = field(repr=False)
    head: Tensor = field(repr=False)
    embedding_scale: float = 1.0


class ExportReader(ABC):
    """A draft as a server would run it, computed from the exported files alone, plainly and slowly.

    Attributes:
        taps: in the order in which the config lists them, which is the order of the columns of `fc`.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype

    @abstractmethod
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """What each step draws from, (k, V_d), before the softmax. Arguments as for `log_probabilities`."""

    @torch.no_grad()
    def log_probabilities(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Distributions of a proposal at temperature 1.

        Args:
            features: the target's streams at positions 0 … n-1: by name of the tap, (n, H) each, or side by side in the
                order of `taps`, (n, taps · H).
            next_tokens: (n,) int64, the token after each of these positions.
            drawn: (k,) int64, the tokens that the draft proposed, as ids of the target. Step i has seen those before i.

        Returns:
            (k, V): row i is the distribution that step i drew from; -inf for tokens that the draft cannot say.
        """
        return self.vocabulary.log_probabilities(self.logits(features, next_tokens, drawn))

    def joined(self, features: Features) -> Tensor:
        """(n, taps · H), the columns as `fc` reads them; StoreError for taps that the target does not have."""
        if not isinstance(features, Tensor):
            missing = [tap.name for tap in self.taps if tap.name not in features]
            if missing:
                known = ", ".join(features)
                raise StoreError(f"layer ids of the export lead to {', '.join(missing)}: expected some of {known}")
            features = torch.cat([features[tap.name] for tap in self.taps], dim=-1)
        return features.to(self.dtype)


def check_target(folder: ExportFolder, sizes: LayerSizes, target: TargetTensors) -> None:
    """StoreError unless the draft is for a target with these tensors."""
    expected = Expected((sizes.vocab, sizes.hidden))
    for name, tensor in (("embedding", target.embedding), ("head", target.head)):
        if not expected.holds(tensor):
            raise StoreError(
                f"{folder.path}: the draft's config is for a target whose {name} is {expected}, "
                f"found {tensor.dtype} {tuple(tensor.shape)}: an export for another target"
            )


def read_taps(folder: ExportFolder, export_format: str, key: str) -> tuple[LayerTap, ...]:
    """Taps from the layer ids under `key`; StoreError for ids that name none."""
    try:
        return from_format(export_format, folder.setting(key, list))
    except ConfigError as error:
        raise StoreError(f"{folder.path / CONFIG}: {key}: {error}; export the draft again") from error
