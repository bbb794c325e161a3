"""The input of an export, a canonical draft and its target; and that of an import, a checkpoint of other software. No pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftworks.config.draft_options import CONFIG, WEIGHTS, DraftConfig, read_draft_config
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.draft_io import read_weights
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import StoreError
from draftworks.storage.artifacts import FileManifest
from draftworks.storage.files import describe_changes, read_json, require_file
from draftworks.storage.identity import LayerTap
from draftworks.storage.words import list_names


@dataclass(frozen=True)
class CanonicalDraft:
    """A draft folder as `draft_io` writes it, with its target.

    Attributes:
        record: the folder's config.json.
        weights: by name, floating point tensors in fp32.
        target: the target's files.
        parts: the sizes, embedding and head of the target, which the draft uses.
    """

    folder: Path
    record: DraftConfig
    weights: Mapping[str, Tensor]
    target: TargetFiles
    parts: TargetParts

    @classmethod
    def load(cls, folder: Path, target: TargetFiles, parts: TargetParts | None = None) -> CanonicalDraft:
        """Read a draft folder and verify its digest and its target.

        Raises:
            StoreError: not a draft folder, damaged, or of another target.
        """
        record = read_draft_config(folder)
        if record.target_digest != target.digest:
            raise StoreError(
                f"{folder}: a draft of the target with digest {record.target_digest}, expected {target.digest} "
                f"({target.name}). Export it with the target it was trained for"
            )
        weights = read_weights(folder / WEIGHTS)
        FileManifest.of_digests({WEIGHTS: record.weights_digest}).require_intact(folder, "Train the draft again")
        return cls(folder, record, weights, target, TargetParts.load(target) if parts is None else parts)

    @property
    def spec(self) -> StrategySpec:
        return resolve_strategy(self.record.strategy)

    @property
    def config(self) -> Mapping[str, Any]:
        """The strategy's own section of config.json: options and sizes."""
        return self.record.draft

    @property
    def options(self) -> Any:
        return self.spec.parse_options(dict(self.config["options"]), where=f"{self.folder}: options")

    @property
    def taps(self) -> tuple[LayerTap, ...]:
        return self.spec.taps(self.target.num_layers, self.options)

    def find_refusals(self, wanted: Iterable[str] | None = None) -> dict[str, str]:
        """Return the reason for each format in which a server would compute another draft, by name of the format."""
        names = [export.name for export in self.spec.usual_exports] if wanted is None else list(wanted)
        refused = self.spec.find_refusals(self.options, self.taps, names)
        scale = self.parts.embedding_scale
        unscaled = {name: why for name in names if (why := self.spec.export(name).find_embedding_refusal(scale))}
        kind = self.config.get("model_type")
        unknown = {name: why for name in names if (why := self.spec.export(name).find_type_refusal(kind))}
        return unscaled | unknown | refused

    @property
    def vocab(self) -> VocabMapping | None:
        """The reduced vocabulary; None for a strategy without one."""
        if not self.spec.uses_vocab_mapping:
            return None
        try:
            return VocabMapping(self.weights["d2t"].numpy(), self.weights["t2d"].numpy())
        except KeyError as error:
            raise StoreError(f"{self.folder / WEIGHTS}: tensor {error} is missing. Train the draft again") from error

    def build_strategy(
        self, dtype: torch.dtype = torch.float32, hold: Callable[[Tensor], Tensor] | None = None
    ) -> DraftStrategy:
        """Build the strategy with these weights, rounded to `dtype` like the target's; it computes in fp32.

        Args:
            hold: returns what is left of a weight in a file that holds it otherwise.

        Raises:
            StoreError: tensors are missing, unexpected or of another shape.
        """
        strategy = self.spec.load_factory()(self.options, round_target(self.parts, dtype), self.vocab, 0)
        expected = {name: tuple(tensor.shape) for name, tensor in strategy.model.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        if expected != found:
            differing = list_names(describe_changes(expected, found), between="; ")
            raise StoreError(
                f"{self.folder / WEIGHTS}: tensors that do not fit its config.json: {differing}. Train the draft again"
            )
        left = hold or partial(round_tensor, dtype=dtype)
        strategy.model.load_state_dict({name: left(tensor) for name, tensor in self.weights.items()})
        return strategy


def round_target(parts: TargetParts, dtype: torch.dtype) -> TargetParts:
    """Return the target with embedding and head in `dtype`; tied ones stay one tensor."""
    embedding = parts.embedding.to(dtype)
    return replace(parts, embedding=embedding, head=embedding if parts.tied else parts.head.to(dtype))


def round_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating point tensor in `dtype`, any other tensor (ids, flags) in its own; contiguous."""
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


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
