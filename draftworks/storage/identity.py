"""Content digests, layer taps and feature keys. Standard library only.

A digest is the first 16 hex digits of a SHA-256 over canonical JSON. JSON keeps the boundaries between values, so that
`["ab", "c"]` and `["a", "bc"]` have different digests.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.storage.files import open_regular, publish_file, read_json

DIGEST_LENGTH = 16
_LARGE_FILE_BYTES = 1_000_000_000
"""Reading a file of more bytes than this takes so long that it is logged."""
FEATURE_SCHEMA = 1
"""Part of every feature key: increase it when the meaning of a stored feature changes."""
SCALE_BYTES = 4
"""Bytes of the scale of one token of a stream that is stored as float8, see `features.scaled_fp8`."""
_BYTES_OF = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


log = logging.getLogger(__name__)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values give equal text, different values different text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the digest of a value that JSON can represent."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:DIGEST_LENGTH]


def file_digest(path: Path) -> str:
    """Return the digest of a file's bytes. Raises OSError if it is not a regular file."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:DIGEST_LENGTH]


class FileDigests:
    """Cache of file digests by path, size, mtime, inode and ctime, so that large weights are read once.

    The mtime alone would miss a file that `tar x`, `cp -p` or `install -p` has replaced; a ctime cannot be set back.

    Args:
        cache_file: JSON file; created if it is missing, replaced atomically, ignored if unreadable.
    """

    def __init__(self, cache_file: Path | None = None) -> None:
        self.cache_file = cache_file
        self._known: dict[str, str] = {}
        self._warned = False
        self._load()

    def remembers(self, path: Path) -> bool:
        """Whether the digest of the file as it is now is known without reading it."""
        return _make_stamp(path) in self._known

    def of_file(self, path: Path) -> str:
        """Return the digest of the file as it is now; it is not cached if the file changed while it was read."""
        stamp = _make_stamp(path)
        if stamp in self._known:
            return self._known[stamp]
        size = path.stat().st_size
        if size > _LARGE_FILE_BYTES:
            log.info(f"reading {path} ({size / 1e9:.1f} GB) to compute its digest, which is then cached")
        found = file_digest(path)
        if _make_stamp(path) == stamp:
            self._known[stamp] = found
            self._save()
        return found

    def _load(self) -> None:
        """Add the digests that other processes have remembered since."""
        if self.cache_file is None or not self.cache_file.exists():
            return
        try:
            loaded = read_json(self.cache_file)
        except (OSError, ValueError):
            return
        if isinstance(loaded, dict):
            self._known = {**loaded, **self._known}

    def _save(self) -> None:
        if self.cache_file is None:
            return
        self._load()
        try:
            with publish_file(self.cache_file) as staging:
                staging.write_text(json.dumps(self._known))
        except OSError as error:  # the folder may not exist on another machine: the files are read again next time
            if not self._warned:
                log.warning(f"digests of files cannot be cached in {self.cache_file}: {error}")
            self._warned = True


class ReadOnceDigests(FileDigests):
    """Digests that look at each file once, for many comparisons at one moment."""

    def __init__(self, digests: FileDigests) -> None:
        self.cache_file = digests.cache_file
        self._digests = digests
        self._seen: dict[Path, str] = {}

    def remembers(self, path: Path) -> bool:
        return path in self._seen or self._digests.remembers(path)

    def of_file(self, path: Path) -> str:
        if path not in self._seen:
            self._seen[path] = self._digests.of_file(path)
        return self._seen[path]


class DigestNotCached(Exception):
    """Raised if a file would have to be read for its digest."""


class RememberedDigests(FileDigests):
    """Cached digests of files that have not changed since they were read; never reads a file."""

    def of_file(self, path: Path) -> str:
        if not self.remembers(path):
            raise DigestNotCached(path)
        return super().of_file(path)


def _make_stamp(path: Path) -> str:
    stat = path.stat()
    return canonical_json(
        [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, ["ctime", stat.st_ctime_ns]]
    )


@dataclass(frozen=True, order=True)
class LayerTap:
    """A residual stream of the target: `hidden_states[hf_index]` of transformers, after `hf_index` decoder layers.

    0 is the embeddings; the stream after the last layer is `LastHidden`. The layer ids of other systems are converted
    here and nowhere else.
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
        """From a 0-based id of the layer whose output is tapped: SpecForge, SGLang and ModelOpt EAGLE-3, z-lab DFlash."""
        return cls(layer + 1)

    def to_layer_output(self) -> int:
        """To the 0-based id of the layer whose output is tapped; -1 for the embeddings, which most systems cannot name."""
        return self.hf_index - 1

    @classmethod
    def from_vllm(cls, layer: int) -> LayerTap:
        """From an id of vLLM or speculators: the number of layers already applied, as `hf_index` is."""
        return cls(layer)

    def to_vllm(self) -> int:
        return self.hf_index


@dataclass(frozen=True)
class LastHidden:
    """The hidden state after the last decoder layer; `normed` is whether the final norm was applied to it."""

    normed: bool = True

    @property
    def name(self) -> str:
        return "last"


Stream = LayerTap | LastHidden


@dataclass(frozen=True)
class EngineIdentity:
    """The engine that computed a feature. `numerics` is increased when its numbers change by more than rounding."""

    name: str
    numerics: int = 1


@dataclass(frozen=True)
class FeatureIdentity:
    """The parts of a feature key that are the same for all features of a run; token digest and stream are added.

    Attributes:
        dtype: of the features as they are read.
        storage: "plain": stored in `dtype`. "fp8": stored as scaled float8_e4m3fn. "fp8_taps": so stored but for `last`.
    """

    target_digest: str
    engine: EngineIdentity
    dtype: str
    storage: str = "plain"

    def get_stored_dtype(self, stream: Stream) -> str:
        """Return the dtype in which a stream is stored."""
        encoded = self.storage == "fp8" or (self.storage == "fp8_taps" and isinstance(stream, LayerTap))
        return "float8_e4m3fn" if encoded else self.dtype

    def count_bytes(self, stream: Stream, hidden_size: int) -> int:
        """Return the bytes that one token of a stream takes in a store."""
        dtype = self.get_stored_dtype(stream)
        return hidden_size * _BYTES_OF[dtype] + (SCALE_BYTES if dtype == "float8_e4m3fn" else 0)

    def key(self, token_digest: str, stream: Stream) -> str:
        """Return the content key of one sample's feature at one stream: 32 hex digits."""
        where = ["tap", stream.hf_index] if isinstance(stream, LayerTap) else ["last", stream.normed]
        fields = [FEATURE_SCHEMA, token_digest, self.target_digest, where]
        fields += [self.engine.name, self.engine.numerics, self.get_stored_dtype(stream)]
        return hashlib.sha256(canonical_json(fields).encode()).hexdigest()[:32]


def token_digest(token_ids: Iterable[int]) -> str:
    """Return the full SHA-256 of token ids as little-endian 32-bit integers; feature keys are derived from it."""
    import array
    import sys

    ids = array.array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


@functools.cache
def read_version(package: str) -> str:
    """Return the version of an installed package. Reading it takes milliseconds, and a process keeps what it has imported.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(package)
