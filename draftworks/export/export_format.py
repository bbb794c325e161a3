"""The interface of export formats: what is needed to write drafts in a format of other software, check and import them.

A format is one small class: the names of the tensors, the config.json, and the meaning of a config.json. Writing, gates and
importing are the same for all formats. The `ExportSpec` of a strategy names the class, how the format counts layers, and
its independent reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftworks.config.draft_options import CONFIG, WEIGHTS
from draftworks.config.exports import ExportSettings
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import load_dotted, resolve_strategy
from draftworks.drafts.strategy import DraftStrategy
from draftworks.export.canonical import CanonicalDraft, Checkpoint, read_checkpoint, round_tensor
from draftworks.export.conventions import PROVENANCE
from draftworks.export.vocabulary import find_vocabulary_problem
from draftworks.storage.files import describe_changes, publish_json
from draftworks.storage.identity import LayerTap

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DraftShape:
    """What a config.json describes, in our terms: everything that decides the sizes and the computation of a draft.

    Attributes:
        taps: layers of the target that `fc` reads, in its order.
        draft_vocab_size: ids that its head predicts; None where the target's head is used.
        rope: rope parameters in the form of transformers 5.
        options: all options of the strategy that change the computation.
        own_embedding: whether the draft has an embedding of its own instead of the target's.
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
        """Return a text `name: expected ours, found theirs` for each field that differs in `other`."""
        return describe_changes(asdict(self), asdict(other))


class ExportFormat(ABC):
    """A file format for drafts of one strategy.

    Methods that take a `config` get any config.json of this format, not only ours.

    Attributes:
        files: names of the files that a server loads, the one with the weights last.
        settings: what the target's entry says of its exports.
    """

    name: str
    strategy: str
    files: tuple[str, ...] = (CONFIG, WEIGHTS)
    settings: ExportSettings = ExportSettings()

    @abstractmethod
    def derive_shape(self, draft: CanonicalDraft) -> DraftShape:
        """Return the shape that `read_shape` must return from an export of this draft."""

    @abstractmethod
    def describe_loaders(self, draft: CanonicalDraft) -> str:
        """Return a sentence: which software loads the export of this draft, from which version on."""

    @abstractmethod
    def build_serve_commands(self, draft: CanonicalDraft, folder: str) -> dict[str, str]:
        """Return the command line that serves the target with the draft in `folder`, by server."""

    @abstractmethod
    def build_tensors(self, draft: CanonicalDraft) -> dict[str, Tensor]:
        """Return the tensors to write under the format's names, in the precision of the canonical checkpoint."""

    @abstractmethod
    def build_config(self, draft: CanonicalDraft, dtype: torch.dtype) -> dict[str, Any]:
        """Return the config.json to write, without the provenance."""

    @abstractmethod
    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of this format."""

    @abstractmethod
    def read_shape(self, config: Mapping[str, Any], target: TargetFiles) -> DraftShape:
        """Return what a config.json describes.

        Raises:
            ConfigError: a key is missing, or it describes a draft that no strategy here can be.
        """

    def write_files(
        self, folder: Path, draft: CanonicalDraft, dtype: torch.dtype, provenance: Mapping[str, Any]
    ) -> None:
        """Write `files` into a folder: safetensors and config.json."""
        tensors = {name: self.hold(tensor, dtype) for name, tensor in self.build_tensors(draft).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        publish_json(folder / CONFIG, self.build_config(draft, dtype) | {PROVENANCE: dict(provenance)})

    def read_files(self, folder: Path) -> Checkpoint:
        """Read what `write_files` wrote. Raises StoreError for files that are missing or damaged."""
        return read_checkpoint(folder)

    def hold(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is left of a tensor in the files of an export in `dtype`, as `read_files` gives it back."""
        return round_tensor(tensor, dtype)

    def build_strategy(self, draft: CanonicalDraft, dtype: torch.dtype) -> DraftStrategy:
        """Return the draft with the weights that are left in the files."""
        return draft.build_strategy(dtype)

    @property
    def quantises(self) -> bool:
        """Whether its files hold less of a draft than a dtype leaves: such a draft is walked before it is handed out."""
        return False

    def find_vocabulary_problem(self, tensors: Mapping[str, Tensor], vocab_size: int) -> str | None:
        """Return what is wrong with the reduced vocabulary of a file; None if nothing is."""
        missing = [name for name in ("d2t", "t2d") if name not in tensors]
        if missing:
            return f"tensor {missing[0]} is missing"
        return find_vocabulary_problem(tensors["d2t"], tensors["t2d"], vocab_size)

    def list_remarks(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
        """Return sentences for the user who imports such a checkpoint: how ambiguous keys were read."""
        return []

    @abstractmethod
    def list_expected_tensors(self, shape: DraftShape) -> Shapes:
        """Return names and shapes of exactly the tensors that a loader needs for such a draft."""

    @abstractmethod
    def to_canonical_name(self, name: str) -> str:
        """Return the canonical name of a tensor with this name in the format or in a variant of it.

        An unknown name is returned unchanged; the importer refuses it.
        """


def list_formats(strategy: str) -> list[str]:
    """Return the names of the export formats that a strategy's drafts are written in where none is named."""
    return [spec.name for spec in resolve_strategy(strategy).usual_exports]


def load_format(strategy: str, name: str, settings: ExportSettings | None = None) -> ExportFormat:
    """Return a strategy's format by name. Raises ConfigError if there is none.

    Args:
        settings: what the target's entry says of its exports.
    """
    made: ExportFormat = load_dotted(resolve_strategy(strategy).export(name).factory)()
    if settings is not None:
        made.settings = settings
    return made
