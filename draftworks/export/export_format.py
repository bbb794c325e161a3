"""What a format of other software must say of itself, so that drafts are written in it, checked and read back.

A format is one small class: which tensors under which names, which config.json, and what a config.json of it means.
Writing, gates and importing are the same for all of them. The `ExportSpec` of its strategy leads here, and says how the
format counts layers and who reads it independently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import load_dotted, resolve_strategy
from draftworks.export.canonical import CanonicalDraft
from draftworks.storage.changes import describe_changes
from draftworks.storage.identity import LayerTap

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DraftShape:
    """A draft as a config.json describes it, in our terms: what decides its sizes and what it computes.

    Attributes:
        taps: layers of the target that `fc` reads, in its order.
        draft_vocab_size: tokens that its head predicts; None where the target's own head does.
        rope: rope parameters in the form of transformers 5.
        options: options of the strategy that change what the draft computes, all of them.
        own_embedding: whether its embedding is its own, and not the target's.
    """

    strategy: str
    taps: tuple[LayerTap, ...]
    hidden_size: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int | None
    rms_norm_eps: float
    rope: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    own_embedding: bool = False

    def describe_differences(self, other: DraftShape) -> list[str]:
        """What is not the same in `other`, a text each: `name: expected ours, found theirs`."""
        return describe_changes(asdict(self), asdict(other))


class ExportFormat(ABC):
    """A format in which drafts of one strategy can be written.

    All methods that take a `config` are given a config.json of this format, which may be anybody's.
    """

    name: str
    strategy: str

    @abstractmethod
    def describe(self, draft: CanonicalDraft) -> DraftShape:
        """Our own draft in the terms in which `shape` describes an export."""

    @abstractmethod
    def loaders(self, draft: CanonicalDraft) -> str:
        """Who loads the export of this draft, and from which version on: a sentence."""

    @abstractmethod
    def serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        """By server, the command line that serves the target with the draft in `folder`."""

    @abstractmethod
    def tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        """What the file holds, by the format's names, in the precision of the source."""

    @abstractmethod
    def config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """config.json, without the provenance."""

    @abstractmethod
    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this format."""

    @abstractmethod
    def shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        """What a config.json says.

        Raises:
            ConfigError: a key is missing, or it says what no draft here can be.
        """

    def remarks(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        """What who imports such a checkpoint should know of how it was read: a sentence each."""
        return []

    @abstractmethod
    def expected_tensors(self, shape: DraftShape) -> Shapes:
        """Names and shapes of the tensors that a loader needs for such a draft, and no others."""

    @abstractmethod
    def canonical_name(self, name: str) -> str:
        """From the name of a tensor in this format, or in a near relative, to that in the canonical checkpoint.

        A name that it does not know stays as it is, for the importer to refuse.
        """


def list_formats(strategy: str) -> list[str]:
    """Formats in which a strategy's drafts can be written."""
    return [spec.name for spec in resolve_strategy(strategy).exports]


def load_format(strategy: str, name: str) -> ExportFormat:
    """The format of that name. Raises ConfigError where the strategy has none such."""
    return load_dotted(resolve_strategy(strategy).export(name).factory)()
