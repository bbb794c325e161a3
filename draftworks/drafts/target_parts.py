"""The few tensors and facts of a target that its drafts need, read by name from its files without loading the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftworks.config.draft_options import LayerOptions, choose_layer_shape, find_embedding_scale
from draftworks.config.run_files import TargetFiles
from draftworks.data.target_files import read_plain_config
from draftworks.errors import ConfigError, StoreError
from draftworks.storage.files import require_file
from draftworks.targets.safetensors_headers import BITS, WEIGHTS, ModelFiles, TensorHeader, read_model_headers
from draftworks.targets.stored_head import require_one_head, select_of_model
from draftworks.targets.weights import read_model_config


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


_OWN_HEAD_PATH = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "dim_model_base")
"""Config keys of models whose logits are not simply head times last hidden state."""


@dataclass(frozen=True)
class TargetParts:
    """The parts of a target that its drafts are built from: sizes, rope, embedding and head.

    Attributes:
        embedding: (V, H), in the dtype of the target's files.
        head: (V, H), same dtype; the same tensor object as `embedding` where the target ties them.
        rope: rope parameters in the form of transformers 5 (`rope_type`, `rope_theta`, ...).
        embedding_scale: factor by which the target multiplies rows of `embedding` at lookup.
        head_bias: whether the target adds a bias to its logits, which its drafts know nothing of.
        own: what differs from the target because the draft has its own, a sentence each.
        source: the files that all this was read from; None where it was made in memory.
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
    head_bias: bool = False
    own: tuple[str, ...] = ()
    source: TargetFiles | None = field(default=None, repr=False)

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    def with_layer_options(self, options: LayerOptions) -> TargetParts:
        """Return a copy in which options of the draft replace the target's values."""
        return replace(
            self,
            head_dim=options.head_dim or self.head_dim,
            rms_norm_eps=options.rms_norm_eps or self.rms_norm_eps,
            rope=options.rope or self.rope,
        )

    @classmethod
    def load(cls, target: TargetFiles, tensors: bool = True) -> TargetParts:
        """Read config, embedding and head from a directory or a pinned hub id; only the shards that hold them.

        Args:
            tensors: False reads config and headers alone: embedding and head are on device meta.

        Raises:
            ConfigError: no such target, an unreadable config, or an architecture whose head this cannot reproduce.
            StoreError: a weight file is missing or damaged, a tensor is absent or of another shape, or a stored head
                differs from the embeddings that config.json ties it to.
        """
        files = ModelFiles(target)
        files.require_folder()
        whole = _read_config(files, may_be_plain=tensors)
        config = whole.get_text_config()
        weights = _Weights(target) if tensors else _HeaderWeights(target)
        shape = (config.vocab_size, config.hidden_size)
        embedding = weights.read(".embed_tokens.weight", shape)
        # A multimodal wrapper has its own flag for tying, not always repeated in its text config.
        tied = _ties(config) or (_ties(whole) and not weights.has("lm_head.weight"))
        if tensors:
            require_one_head(target)
        layers = choose_layer_shape(config)
        return cls(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            max_positions=config.max_position_embeddings,
            embedding=embedding,
            head=embedding if tied else weights.read("lm_head.weight", shape),
            head_bias=weights.has("lm_head.bias"),
            embedding_scale=find_embedding_scale(config.model_type, config.hidden_size),
            source=target,
            **{each.name: getattr(layers, each.name) for each in fields(layers)},
        )


def read_final_norm(target: TargetFiles, hidden_size: int) -> Tensor:
    """Return the weight (H,) of the norm before the target's head, in the dtype of its files.

    Raises:
        ConfigError: no such target.
        StoreError: a weight file is missing or damaged, or there is not one such tensor of that size.
    """
    return _Weights(target).read(".norm.weight", (hidden_size,))


class _Weights:
    """Single tensors of the target's safetensors files, sharded or not."""

    def __init__(self, target: TargetFiles) -> None:
        self._where = ModelFiles(target).where
        self._files = WeightFiles(target)

    def read(self, suffix: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of the one tensor of the language model whose name ends with `suffix`."""
        name = _find_one(self._files, suffix, self._where)
        tensor = self._files.open_tensor(name)[:].clone()
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise _make_shape_error(self._files[name], name, shape, f"{tensor.dtype} {tuple(tensor.shape)}")
        return tensor

    def has(self, suffix: str) -> bool:
        return bool(_find_names(self._files, suffix))


class _HeaderWeights:
    """Tensors on device meta, found and refused by the files' headers as `_Weights` would by the files.

    Where the hub cannot be reached for the headers, every tensor is taken to be as the config says.
    """

    def __init__(self, target: TargetFiles) -> None:
        self._where = ModelFiles(target).where
        self._tensors: Mapping[str, TensorHeader] | None = None
        try:
            headers = read_model_headers(target)
        except ConfigError:
            return
        index = ModelFiles(target).read_index()
        found = {**headers.beside, **headers.tensors}
        self._tensors = found if index is None else {name: found[name] for name in index}

    def has(self, suffix: str) -> bool:
        if self._tensors is None:
            return suffix == "lm_head.weight"
        return bool(_find_names(self._tensors, suffix))

    def read(self, suffix: str, shape: tuple[int, int]) -> Tensor:
        if self._tensors is not None:
            name = _find_one(self._tensors, suffix, self._where)
            header = self._tensors[name]
            if header.shape != shape or not header.dtype.startswith(("F", "BF")):
                raise _make_shape_error(header.file, name, shape, f"{header.dtype} {header.shape}")
        return torch.empty(shape, device="meta")


def _find_names(names: Iterable[str], suffix: str) -> list[str]:
    return select_of_model(name for name in names if name.endswith(suffix))


def _find_one(names: Collection[str], suffix: str, where: str) -> str:
    """Return the one name of the language model that ends with `suffix`; raise StoreError if there is not one."""
    found = _find_names(names, suffix)
    if len(found) != 1:
        several = f"several: {sorted(found)}" if found else f"none among {len(names)} tensors"
        raise StoreError(f"{where}: expected one tensor '*{suffix}', found {several}")
    return found[0]


def _make_shape_error(file: Path | str, name: str, shape: tuple[int, ...], found: str) -> StoreError:
    return StoreError(f"{file}: {name}: expected floating point {shape} as config.json says, found {found}")


def _ties(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _read_config(files: ModelFiles, may_be_plain: bool) -> Any:
    """Return the model's config; raise ConfigError if its head needs more than one matrix product.

    Args:
        may_be_plain: without transformers where possible, for programs; checks ask it about every key of the file.
    """
    path = files.find_file("config.json")
    if path is None:
        raise ConfigError(f"{files.where}: config.json is missing: not a Hugging Face model directory")
    plain = read_plain_config(path) if may_be_plain else None
    if plain is not None:
        return plain
    whole = read_model_config(files.target)
    if isinstance(whole, str):
        raise ConfigError(f"{whole}: update transformers, or take another model")
    config = whole.get_text_config()
    own = [key for key in _OWN_HEAD_PATH if getattr(config, key, None) not in (None, 1, 1.0)]
    if own:
        raise ConfigError(f"{path}: {', '.join(own)}: targets that rescale their logits are not supported yet")
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    missing = [key for key in needed if not isinstance(getattr(config, key, None), int)]
    if missing:
        raise ConfigError(
            f"{path}: {', '.join(missing)} missing or not a number: the target of a draft must be a decoder with attention"
        )
    return whole
