"""The reduced vocabulary of a draft: which target tokens its head predicts (as in EAGLE-3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.storage.files import publish_file, read_bytes
from draftworks.storage.identity import digest

if TYPE_CHECKING:
    from draftworks.data.tokenized import TokenizedSet

_MOST_BYTES = 1 << 30

REMAKE_ADVICE = "Make it again; where it is part of a draft, train the draft again"


@dataclass(frozen=True, eq=False)
class VocabMapping:
    """Mapping between V_d draft ids, ascending in target id, and V target ids.

    Attributes:
        d2t: int64 (V_d,) offsets: target id = draft id + d2t[draft id].
        t2d: bool (V,): whether the draft predicts a target id.
    """

    d2t: np.ndarray
    t2d: np.ndarray

    @property
    def target_ids(self) -> np.ndarray:
        """Target id of every draft id, int64 (V_d,), ascending."""
        return self.d2t + np.arange(len(self.d2t))

    @property
    def digest(self) -> str:
        """Content digest of both vocabulary sizes and the kept ids."""
        return digest([len(self.t2d), self.target_ids.tolist()])

    def measure_coverage(self, counts: np.ndarray) -> float:
        """Return the share of counted tokens that the draft can predict; 0 if nothing was counted."""
        total = int(counts.sum())
        return float(counts[self.t2d].sum() / total) if total else 0.0

    def save(self, path: Path) -> None:
        """Publish as safetensors with the tensors `d2t` and `t2d`."""
        from safetensors.numpy import save

        with publish_file(path) as staging:
            staging.write_bytes(save({"d2t": self.d2t, "t2d": self.t2d}))

    @classmethod
    def load(cls, path: Path) -> VocabMapping:
        """Load and check what `save` wrote.

        Raises:
            StoreError: missing, unreadable, of other shapes or dtypes, or the two tensors contradict each other.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            tensors = load(read_bytes(path, _MOST_BYTES))
        except (OSError, ValueError, SafetensorError) as error:
            raise StoreError(f"{path}: the vocabulary mapping cannot be read ({error}). {REMAKE_ADVICE}") from error
        problem = _find_inconsistency(tensors)
        if problem:
            raise StoreError(f"{path}: not a vocabulary mapping: {problem}. {REMAKE_ADVICE}")
        return cls(tensors["d2t"], tensors["t2d"])


def count_supervised_tokens(tokens: TokenizedSet, vocab_size: int) -> np.ndarray:
    """Return how often each target id is supervised, int64 (V,).

    Raises:
        DataError: an id is outside the vocabulary.
    """
    supervised = tokens.flat_ids[tokens.flat_mask]
    if supervised.size and (int(supervised.max()) >= vocab_size or int(supervised.min()) < 0):
        raise DataError(
            f"tokenized set {tokens.digest} has ids {supervised.min()} to {supervised.max()},"
            f" the vocabulary {vocab_size} ids: it belongs to another target"
        )
    return np.bincount(supervised, minlength=vocab_size).astype(np.int64)


def build_vocab_mapping(counts: np.ndarray, draft_vocab_size: int) -> VocabMapping:
    """Return the mapping of the most frequent ids; equally frequent ones (also unseen ones) by lowest id.

    Args:
        counts: supervised occurrences of each target id, (V,).

    Raises:
        ConfigError: the draft vocabulary is larger than the target's.
    """
    vocab_size = len(counts)
    if not 0 < draft_vocab_size <= vocab_size:
        raise ConfigError(
            f"draft_vocab_size {draft_vocab_size} is not within 1 and the target's vocabulary of {vocab_size}:"
            f" set options.draft_vocab_size to {vocab_size} or less"
        )
    by_frequency = np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable")
    used = np.sort(by_frequency[:draft_vocab_size])
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[used] = True
    return VocabMapping(d2t=used - np.arange(draft_vocab_size), t2d=t2d)


def _find_inconsistency(tensors: dict[str, np.ndarray]) -> str | None:
    """Return what is wrong with loaded tensors, or None."""
    if set(tensors) != {"d2t", "t2d"}:
        return f"expected the tensors d2t and t2d, found {sorted(tensors)}"
    for name, dtype in (("d2t", np.int64), ("t2d", np.bool_)):
        if tensors[name].dtype != dtype or tensors[name].ndim != 1:
            return f"expected {name} as {np.dtype(dtype)} of one dimension, found {tensors[name].dtype} {tensors[name].shape}"
    target_ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    if not np.array_equal(target_ids, np.flatnonzero(tensors["t2d"])):
        return "d2t and t2d name different tokens"
    return None
