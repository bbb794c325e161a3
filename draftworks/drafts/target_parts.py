"""The few tensors and facts of a target that its drafts need, read without loading the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftworks.config.layer_options import LayerOptions
from draftworks.config.layer_shape import embedding_scale, layer_shape
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.hub import hub_file
from draftworks.storage.regular_files import checked_file, read_json

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OWN_HEAD_PATH = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "dim_model_base")
"""Config keys of models whose logits are not simply head times last hidden state."""
_OF_THE_MODEL = re.compile(r"^(?!mtp\.)(?!.*\.layers\.\d)(?!.*(vision|visual|audio))")
"""Names outside towers for other inputs and layers that predict further tokens, which have embeddings and heads too."""


@dataclass(frozen=True)
class TargetParts:
    """What a draft takes from its target: sizes, rope, embedding and head.

    Attributes:
        embedding: (V, H), in the dtype of the target's files.
        head: (V, H), same dtype; the same tensor object as `embedding` where the target ties them.
        rope: rope parameters in the form of transformers 5 (`rope_type`, `rope_theta`, ...).
        embedding_scale: by what the target multiplies rows of `embedding` as it looks them up.
        own: what of the rest is the draft's own and not the target's, a sentence each.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    num_layers: int
    max_positions: int
    embedding: Tensor = field(repr=False)
    head: Tensor = field(repr=False)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    embedding_scale: float = 1.0
    own: tuple[str, ...] = ()

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    def shaped(self, options: LayerOptions) -> TargetParts:
        """With what a draft's own options say instead of the target."""
        return replace(
            self,
            head_dim=options.head_dim or self.head_dim,
            rms_norm_eps=options.rms_norm_eps or self.rms_norm_eps,
            rope=options.rope or self.rope,
        )

    @classmethod
    def load(cls, target: TargetFiles, tensors: bool = True) -> TargetParts:
        """Read config, embedding and head of a directory or a pinned hub id; of a sharded target only their shards.

        Args:
            tensors: False reads the config alone: embedding and head are on device meta, with the shapes that follow.

        Raises:
            ConfigError: no such target, an unreadable config, or an architecture whose head this cannot reproduce.
            StoreError: a weight file is missing or damaged, or a tensor is absent or of another shape.
        """
        files = _Files(target)
        whole = _config(files)
        config = whole.get_text_config()
        weights = _Weights(files) if tensors else _NoData()
        shape = (config.vocab_size, config.hidden_size)
        embedding = weights.read(".embed_tokens.weight", shape)
        # A wrapper that ties says so itself, and not always in its text part.
        tied = _ties(config) or (_ties(whole) and not weights.has("lm_head.weight"))
        layers = layer_shape(config)
        return cls(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            max_positions=config.max_position_embeddings,
            embedding=embedding,
            head=embedding if tied else weights.read("lm_head.weight", shape),
            embedding_scale=embedding_scale(config.model_type, config.hidden_size),
            **{each.name: getattr(layers, each.name) for each in fields(layers)},
        )


class _Files:
    """The target's files by name, from a directory or from the hub's cache."""

    def __init__(self, target: TargetFiles) -> None:
        self.name = f"target {target.name!r} ({target.model})"
        self._target = target
        if target.revision is None and not Path(target.model).is_dir():
            raise ConfigError(
                f"{self.name}: no such directory. Correct `model`, or give the `revision` (commit) of a hub id."
            )

    def path(self, filename: str) -> Path | None:
        """Where the file is, downloaded if need be; None if the target has no such file."""
        if self._target.revision is None:
            path = Path(self._target.model) / filename
            return path if path.is_file() else None
        return hub_file(f"target {self._target.name}", self._target.model, self._target.revision, filename)


class _Weights:
    """Single tensors out of the target's safetensors, sharded or not."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        self._shard_of = self._tensor_files()

    def read(self, suffix: str, shape: tuple[int, int]) -> Tensor:
        """The one tensor of the language model whose name ends with `suffix`, copied out of its file."""
        names = self._named(suffix)
        if len(names) != 1:
            found = f"several: {sorted(names)}" if names else f"none among {len(self._shard_of)} tensors"
            raise StoreError(f"{self._files.name}: expected one tensor '*{suffix}', found {found}")
        shard = self._existing(self._shard_of[names[0]])
        with _opened(shard) as stream:
            if names[0] not in stream.keys():  # noqa: SIM118 - not a mapping
                raise StoreError(f"{shard}: the index says that {names[0]} is here, and it is not")
            tensor = stream.get_tensor(names[0]).clone()
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise StoreError(
                f"{shard}: {names[0]}: expected floating point {shape} as config.json says, "
                f"found {tensor.dtype} {tuple(tensor.shape)}"
            )
        return tensor

    def has(self, suffix: str) -> bool:
        return bool(self._named(suffix))

    def _named(self, suffix: str) -> list[str]:
        return [name for name in self._shard_of if name.endswith(suffix) and _OF_THE_MODEL.match(name)]

    def _tensor_files(self) -> dict[str, str]:
        index = self._files.path(_INDEX)
        if index is not None:
            try:
                return dict(read_json(index)["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{index}: not a safetensors index: {error!r}") from error
        with _opened(self._existing(_WEIGHTS)) as stream:
            return dict.fromkeys(stream.keys(), _WEIGHTS)

    def _existing(self, filename: str) -> Path:
        path = self._files.path(filename)
        if path is None:
            raise StoreError(f"{self._files.name}: {filename} is missing; weights must be safetensors")
        return path


def _ties(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


class _NoData:
    """Instead of `_Weights`: tensors that have a shape and nothing else."""

    def has(self, suffix: str) -> bool:
        return True

    def read(self, suffix: str, shape: tuple[int, int]) -> Tensor:
        return torch.empty(shape, device="meta")


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(checked_file(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path}: not a readable safetensors file ({error}); copy or download it again") from error


def _config(files: _Files) -> Any:
    """The model's configuration, the language model in it checked for heads that need more than one matrix product."""
    from transformers import AutoConfig

    path = files.path("config.json")
    if path is None:
        raise ConfigError(f"{files.name}: config.json is missing: not a Hugging Face model directory")
    try:
        whole = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: {error}") from error
    config = whole.get_text_config()
    own = [key for key in _OWN_HEAD_PATH if getattr(config, key, None) not in (None, 1, 1.0)]
    if own:
        raise ConfigError(f"{path}: {', '.join(own)}: targets that rescale their logits are not supported yet")
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    missing = [key for key in needed if not isinstance(getattr(config, key, None), int)]
    if missing:
        raise ConfigError(
            f"{path}: {', '.join(missing)} missing, or no number: drafts need a decoder with attention as their target"
        )
    return whole
