"""Identity is content: digests, layer taps and feature keys. Standard library only.

A digest here is the first 16 hex digits of a SHA-256 over canonical JSON, so two different values never share one
because of how they were joined together.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.storage.atomic import publish_file
from draftworks.storage.regular_files import open_regular, read_json

DIGEST_LENGTH = 16
_LARGE_FILE_BYTES = 1_000_000_000
"""Bytes of a file that takes so long to read that somebody who waits is told."""
FEATURE_SCHEMA = 1
"""Part of every feature key: bump it when what a stored feature *means* changes."""


log = logging.getLogger(__name__)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, different values different text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Digest of any JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:DIGEST_LENGTH]


def file_digest(path: Path) -> str:
    """Digest of a file's bytes. Raises OSError for what is no regular file."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:DIGEST_LENGTH]


class FileDigests:
    """File digests remembered by path, size, mtime, inode and ctime, so that large weights are read once.

    The mtime alone would miss what `tar x`, `cp -p` or `install -p` put in a file's place; nobody can set a ctime back.

    Args:
        cache_file: JSON file; created on demand, replaced atomically, ignored when unreadable.
    """

    def __init__(self, cache_file: Path | None = None) -> None:
        self.cache_file = cache_file
        self._known: dict[str, str] = {}
        if cache_file is not None and cache_file.exists():
            try:
                loaded = read_json(cache_file)
                self._known = loaded if isinstance(loaded, dict) else {}
            except (OSError, ValueError):
                self._known = {}

    def of_file(self, path: Path) -> str:
        """Digest of the file as it is now. One that is written to while it is read is not remembered."""
        stamp = _make_stamp(path)
        if stamp in self._known:
            return self._known[stamp]
        size = path.stat().st_size
        if size > _LARGE_FILE_BYTES:
            log.info(f"reading {path} ({size / 1e9:.1f} GB) to know its digest, which is remembered")
        found = file_digest(path)
        if _make_stamp(path) == stamp:
            self._known[stamp] = found
            self._save()
        return found

    def _save(self) -> None:
        if self.cache_file is None:
            return
        try:
            with publish_file(self.cache_file) as staging:
                staging.write_text(json.dumps(self._known))
        except OSError as error:  # another machine may have no such folder: the files are read again next time
            log.warning(f"digests of files cannot be remembered in {self.cache_file}: {error}")


def _make_stamp(path: Path) -> str:
    stat = path.stat()
    return canonical_json(
        [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino, ["ctime", stat.st_ctime_ns]]
    )


@dataclass(frozen=True, order=True)
class LayerTap:
    """A residual stream of the target: `hidden_states[hf_index]` of transformers, the stream after `hf_index` decoder
    layers (0 = embeddings). The stream after the last layer is no tap but `LastHidden`.

    Other systems number streams differently; they are converted here and nowhere else.
    """

    hf_index: int

    def __post_init__(self) -> None:
        if self.hf_index < 0:
            raise ValueError(f"a layer tap counts decoder layers from 0, found {self.hf_index}")

    @property
    def name(self) -> str:
        return f"hf{self.hf_index}"

    @classmethod
    def from_layer_output(cls, layer: int) -> LayerTap:
        """From "output of the 0-based layer": SpecForge, SGLang and ModelOpt EAGLE-3 ids, z-lab DFlash ids."""
        return cls(layer + 1)

    def to_layer_output(self) -> int:
        """To "output of the 0-based layer". The embeddings (-1) have no such id in most systems."""
        return self.hf_index - 1

    @classmethod
    def from_vllm(cls, layer: int) -> LayerTap:
        """From vLLM and speculators ids, which count layers already passed, as `hf_index` does."""
        return cls(layer)

    def to_vllm(self) -> int:
        return self.hf_index


@dataclass(frozen=True)
class LastHidden:
    """The hidden state after the last decoder layer; `normed` says whether the final norm was applied to it."""

    normed: bool = True

    @property
    def name(self) -> str:
        return "last"


Stream = LayerTap | LastHidden


@dataclass(frozen=True)
class EngineIdentity:
    """Who computed a feature. `numerics` is raised by us when the engine's numbers change beyond rounding."""

    name: str
    numerics: int = 1


@dataclass(frozen=True)
class FeatureIdentity:
    """What the features of a run have in common; with token ids and a stream it makes a key."""

    target_digest: str
    engine: EngineIdentity
    dtype: str

    def key(self, token_digest: str, stream: Stream) -> str:
        """Content key of one sample's feature at one stream: 32 hex digits."""
        where = ["tap", stream.hf_index] if isinstance(stream, LayerTap) else ["last", stream.normed]
        fields = [FEATURE_SCHEMA, token_digest, self.target_digest, where]
        fields += [self.engine.name, self.engine.numerics, self.dtype]
        return hashlib.sha256(canonical_json(fields).encode()).hexdigest()[:32]


def token_digest(token_ids: Iterable[int]) -> str:
    """SHA-256 of token ids as little-endian 32-bit integers; the whole digest, because keys are made of it."""
    import array
    import sys

    ids = array.array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()
