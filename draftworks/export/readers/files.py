"""An exported folder: config.json and model.safetensors, asked for exactly what a format says they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage.regular_files import read_json, require_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_ABSENT = object()


class Expected(NamedTuple):
    """What a tensor must be; without a dtype, any floating one."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def holds(self, tensor: Tensor) -> bool:
        kind = tensor.is_floating_point() if self.dtype is None else tensor.dtype == self.dtype
        return kind and tuple(tensor.shape) == self.shape

    def __str__(self) -> str:
        return f"{self.dtype or 'floating point'} {self.shape}"


@dataclass(frozen=True)
class ExportFolder:
    """Everything in the folder. Loaders of servers skip what they do not know and fill in what they miss; this one
    takes neither, and says which key is at fault."""

    path: Path
    config: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ExportFolder:
        """StoreError if one of the two files is missing or unreadable."""
        try:
            config = read_json(path / CONFIG)
            tensors = load_file(require_file(path / WEIGHTS))
        except (OSError, ValueError, SafetensorError) as error:
            raise StoreError(f"{path}: expected {CONFIG} and {WEIGHTS} of one draft: {error}") from error
        if not isinstance(config, dict):
            raise StoreError(f"{path / CONFIG}: expected a JSON object, found {type(config).__name__}")
        return cls(path, config, tensors)

    def setting(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of a key that must be there; dots lead into nested objects."""
        return self._typed(key, kind, self._look_up(key))

    def optional(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, or `default` where it is missing or null."""
        value = self._look_up(key)
        return default if value is _ABSENT or value is None else self._typed(key, kind, value)

    def has(self, key: str) -> bool:
        return self._look_up(key) is not _ABSENT

    def must_be(self, key: str, expected: Any) -> None:
        """StoreError unless the key is there with this value."""
        if self._look_up(key) != expected:
            self.refuse(key, repr(expected), self._found(key))

    def must_not_differ(self, key: str, expected: Any) -> None:
        """StoreError if the key is there with another value. For keys whose default is the expected value everywhere."""
        if self.has(key) and self._look_up(key) not in (expected, None):
            self.refuse(key, f"{expected!r} or nothing", self._found(key))

    def refuse(self, key: str, expected: str, found: str) -> NoReturn:
        raise StoreError(f"{self.path / CONFIG}: {key}: expected {expected}, found {found}; export the draft again")

    def check_tensors(self, expected: Mapping[str, Expected]) -> None:
        """StoreError unless the file holds exactly these tensors."""
        missing, extra = sorted(expected.keys() - self.tensors.keys()), sorted(self.tensors.keys() - expected.keys())
        if missing or extra:
            raise StoreError(
                f"{self.path / WEIGHTS}: expected {len(expected)} tensors, missing: {', '.join(missing) or 'none'}; "
                f"unknown: {', '.join(extra) or 'none'}. A server would fill or skip these silently; export again"
            )
        for name, wanted in expected.items():
            tensor = self.tensors[name]
            if not wanted.holds(tensor):
                raise StoreError(
                    f"{self.path / WEIGHTS}: {name}: expected {wanted}, found {tensor.dtype} {tuple(tensor.shape)}"
                )

    def _look_up(self, key: str) -> Any:
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return _ABSENT
            value = value[part]
        return value

    def _found(self, key: str) -> str:
        value = self._look_up(key)
        return "no such key" if value is _ABSENT else repr(value)

    def _typed(self, key: str, kind: type | tuple[type, ...], value: Any) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # In Python a bool is an int; in these files it never stands for one.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(key, " or ".join(k.__name__ for k in kinds), self._found(key))
        return value


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's ids (V_d,) int64 of what the draft's head predicts, of `size` ids in all."""

    ids: Tensor
    size: int

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits (k, V_d) to log probabilities (k, V) over the target's ids; -inf for those the draft cannot say."""
        whole = logits.new_full((len(logits), self.size), -math.inf)
        whole[:, self.ids] = logits.log_softmax(-1)
        return whole


def vocabulary_tensors(draft_size: int, size: int) -> dict[str, Expected]:
    return {"d2t": Expected((draft_size,), torch.int64), "t2d": Expected((size,), torch.bool)}


def read_vocabulary(folder: ExportFolder, size: int) -> DraftVocabulary:
    """From d2t and t2d where the file has them (their shapes are checked), else all of the target's.

    Raises:
        StoreError: the offsets do not lead to the tokens that t2d names, in ascending order.
    """
    if "d2t" not in folder.tensors:
        return DraftVocabulary(torch.arange(size), size)
    offsets, members = folder.tensors["d2t"], folder.tensors["t2d"].nonzero()[:, 0]
    ids = offsets + torch.arange(len(offsets))
    if not torch.equal(ids, members):
        absolute = "These are the ids themselves, and servers add i to each. " if torch.equal(offsets, members) else ""
        raise StoreError(
            f"{folder.path / WEIGHTS}: d2t: expected offsets d2t[i] = id - i to the {len(members)} tokens of t2d, "
            f"{_ends(members)}, found {len(ids)} that lead to {_ends(ids)}. {absolute}Export the draft again"
        )
    return DraftVocabulary(ids, size)


def _ends(ids: Tensor) -> str:
    return f"{ids[:3].tolist()} … {ids[-3:].tolist()}"


def check_speculators_header(folder: ExportFolder, algorithm: str) -> None:
    """StoreError unless speculators 0.9.0 and vLLM find what they look at before they look at the model."""
    folder.must_be("speculators_model_type", algorithm)
    folder.must_be("speculators_config.algorithm", algorithm)
    folder.must_be("speculators_config.default_proposal_method", "greedy")
    folder.must_not_differ("tie_word_embeddings", False)
    if not folder.setting("speculators_config.verifier.name_or_path", str):
        folder.refuse("speculators_config.verifier.name_or_path", "the target's directory or hub id", "an empty string")
    if speculative_tokens(folder) < 1:
        folder.refuse(_METHODS, "at least one speculative token", "none")


def speculative_tokens(folder: ExportFolder) -> int:
    """How many tokens a server asks the draft for: vLLM reads the first proposal method."""
    methods = folder.setting(_METHODS, list)
    tokens = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
    if not isinstance(tokens, int):
        folder.refuse(_METHODS, "a method with its number of speculative_tokens", str(methods))
    return tokens


_METHODS = "speculators_config.proposal_methods"
