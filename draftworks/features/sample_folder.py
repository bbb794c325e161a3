"""A shared folder of features, one file each: names, publication, removal, and the file itself.

    root/store.json                                 identity of the store
    root/samples/{xxx}/{digest of key}.safetensors  one feature, complete and immutable
    root/staging/{host}~{pid}~{id}.tmp              being written; swept when old

A file's name is a digest of the feature's key, `xxx` its first three digits: no key, however hostile, is part of a path.
Stores of before, of schema 1, also have files `{digest}.g{generation}.safetensors`, of which the highest generation
counts; they are read and freed as the others.

The header's `__metadata__` has two entries: `record`, JSON with the id, a generation (0; other in files of before) and
for each tensor dtype, shape and checksum; and `seal`, SHA-256 over all bytes of the header with the seal's own digits as
zeros, so that any altered byte is detected. The record says which hash the checksums are: XXH3 of 128 bits, or SHA-256
in files of before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.shards import staging_name
from draftworks.features.store_parts import dtype_name
from draftworks.features.tensor_bytes import (
    LENGTH_BYTES,
    encode_safetensors_header,
    lay_out,
    sha256_of,
    view_buffer,
    xxh3_of,
)
from draftworks.storage.files import fsync, parse_json, read_json
from draftworks.storage.identity import canonical_json

if TYPE_CHECKING:
    from torch import Tensor


SAMPLE_SCHEMA = "draftworks.sample.2"
_SCHEMA_BEFORE = "draftworks.sample.1"
_HASHES: Mapping[str, Callable[[Tensor], str]] = {"xxh3_128": xxh3_of, "sha256": sha256_of}
MAX_HEADER_BYTES = 64 << 20
_BLANK = b"0" * 64
# Quotes inside a JSON string are escaped, so neither a sample id nor a tensor name can contain this pattern.
_SEAL = re.compile(rb'"seal":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class TensorRecord:
    """The record of one tensor in a sample file: torch dtype name, shape, checksum of its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: str

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": self.shape, "checksum": self.checksum}


@dataclass(frozen=True)
class SampleHeader:
    """The verified header of a sample file; `spans` are the byte ranges of the tensors, `hash` names their checksums'."""

    path: Path
    sample_id: str
    tensors: Mapping[str, TensorRecord]
    spans: Mapping[str, slice]
    hash: str


def write_sample(path: Path, sample_id: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a sample file at `path`; syncing and publishing are the store's part."""
    own = lay_out({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    records = {name: TensorRecord(dtype_name(t), tuple(t.shape), t.nbytes, xxh3_of(t)) for name, t in own.items()}
    record = {
        "schema": SAMPLE_SCHEMA,
        "sample_id": sample_id,
        "generation": 0,
        "sealed_by": "sha256",
        "hash": "xxh3_128",
        "tensors": {name: each.to_json() for name, each in records.items()},
    }
    metadata = {"record": canonical_json(record), "seal": _BLANK.decode()}
    blank = encode_safetensors_header(metadata, records)
    place = _SEAL.search(blank)
    assert place is not None, "the metadata has it"
    with path.open("wb") as stream:
        stream.write(blank[: place.start(1)] + seal(blank[LENGTH_BYTES:]).encode() + blank[place.end(1) :])
        for tensor in own.values():
            stream.write(view_buffer(tensor))


def read_sample_header(stream: BufferedReader, path: Path) -> SampleHeader:
    """Read and verify the header of an open sample file, and the file's length.

    Raises:
        StoreError: truncated, altered, or of another schema.
    """
    try:
        header = _header_bytes(stream)
        fields = parse_json(header)
        record = parse_json(fields.pop("__metadata__")["record"])
        place = _SEAL.search(header)
        if place is None:
            raise ValueError("it has no seal")
        blank = header[: place.start(1)] + _BLANK + header[place.end(1) :]
        require_seal(str(record["sealed_by"]), place[1].decode(), blank, str(path))
        found = _parsed(path, record, fields, data_start=8 + len(header))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise StoreError(f"{path} has no readable header ({error!r}): it is truncated or altered") from error
    expected = max((span.stop for span in found.spans.values()), default=8 + len(header))
    size = os.fstat(stream.fileno()).st_size
    if size != expected:
        raise StoreError(f"{path} is truncated or has grown: expected {expected} bytes, found {size}")
    return found


def read_tensor(stream: BufferedReader, header: SampleHeader, name: str) -> Tensor:
    """Read a tensor into memory of its own: a mapped file may vanish when another machine frees it.

    Raises:
        StoreError: its bytes are not those that were stored.
    """
    import torch

    record, span = header.tensors[name], header.spans[name]
    content = torch.empty(span.stop - span.start, dtype=torch.uint8)
    stream.seek(span.start)
    read = stream.readinto(view_buffer(content))
    found = _HASHES[header.hash](content)
    if read != len(content) or found != record.checksum:
        raise StoreError(
            f"{header.path}, tensor {name}, is altered: expected checksum {record.checksum[:16]}, found {found[:16]}"
        )
    return content.view(getattr(torch, record.dtype)).reshape(record.shape)


def seal(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_seal(kind: str, found: str, content: bytes, where: str) -> None:
    """Raise StoreError unless `found` is the seal of `content`.

    Args:
        kind: the seal that `content` claims to have; it decides the wording of the error only.
        where: what was read, for the error.
    """
    if found == seal(content):
        return
    reason = "the seal does not match: it is altered"
    if kind != "sha256":
        reason = f"expected a seal by sha256, found {kind!r}: stores with a shared secret are not read any more"
    raise StoreError(f"{where} is refused: {reason}")


def _parsed(path: Path, record: dict[str, Any], fields: dict[str, Any], data_start: int) -> SampleHeader:
    if record["schema"] not in (_SCHEMA_BEFORE, SAMPLE_SCHEMA):
        raise StoreError(f"{path} has schema {record['schema']!r}, expected {SAMPLE_SCHEMA!r}")
    before = record["schema"] == _SCHEMA_BEFORE
    hashed, field = ("sha256", "sha256") if before else (record["hash"], "checksum")
    if hashed not in _HASHES:
        raise StoreError(f"{path} has checksums by {hashed!r}, expected one of {', '.join(_HASHES)}")
    offsets = {name: fields[name]["data_offsets"] for name in record["tensors"]}
    spans = {name: slice(data_start + first, data_start + last) for name, (first, last) in offsets.items()}
    tensors = {
        name: TensorRecord(value["dtype"], tuple(value["shape"]), spans[name].stop - spans[name].start, value[field])
        for name, value in record["tensors"].items()
    }
    return SampleHeader(path, record["sample_id"], tensors, spans, hashed)


def _header_bytes(stream: BufferedIOBase) -> bytes:
    stream.seek(0)
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header should be {length} bytes, the most allowed is {MAX_HEADER_BYTES}")
    header = stream.read(length)
    if len(header) != length:
        raise ValueError(f"its header should be {length} bytes, the file has {len(header)} of them")
    return header


STORE_SCHEMA = "draftworks.shared-dir-store.2"
_STORE_SCHEMA_BEFORE = "draftworks.shared-dir-store.1"
STORE_FILE = "store.json"
_FILE_NAME = re.compile(r"([0-9a-f]{32})(?:\.g([1-9][0-9]{0,18}))?\.safetensors")


def sample_key(sample_id: str) -> str:
    return sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class SampleFolder:
    """Finds, publishes and removes the files of features below `root`, which it creates if absent.

    Attributes:
        store_id: the same for every machine, wherever each mounts the folder.

    Raises:
        StoreError: `root` cannot be such a folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._samples = self.root / "samples"
        self._staging = self.root / "staging"
        try:
            for folder in (self._samples, self._staging):
                folder.mkdir(parents=True, exist_ok=True)
            identity = self._agree_on_identity()
        except OSError as error:
            raise StoreError(f"{self.root} cannot be opened as a shared feature store: {error}") from error
        self.store_id = str(identity["store_id"])
        self._has_generations = identity["schema"] == _STORE_SCHEMA_BEFORE

    def path(self, key: str) -> Path:
        """Return where the feature of a key is published."""
        digest = sample_key(key)
        return self._samples / digest[:3] / f"{digest}.safetensors"

    def find(self, key: str) -> Path | None:
        """Return the file of a key; None if there is none."""
        path = self.path(key)
        if path.exists():
            return path
        return max(self._list_generations(key), key=_generation_of, default=None) if self._has_generations else None

    def list_files(self) -> dict[str, Path]:
        """Return the files by the digests of their keys."""
        found: dict[str, Path] = {}
        for path in sorted(self._samples.glob("*/*.safetensors"), key=_generation_of):
            match = _FILE_NAME.fullmatch(path.name)
            if match is not None:
                found[match[1]] = path
        return found

    @contextmanager
    def stage(self) -> Iterator[Path]:
        """Context with a path to write to; what is left there at exit is removed."""
        path = self._staging / staging_name()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def publish(self, staged: Path, final: Path) -> bool:
        """Make a synced file appear as `final`; return False if another process made that name appear first.

        A hard link, unlike a rename, never replaces: of two writers of one name exactly one succeeds, and knows it.
        """
        if not final.parent.exists():
            final.parent.mkdir(exist_ok=True)
            fsync(final.parent.parent)
        try:
            os.link(staged, final)
        except FileExistsError:
            # NFS repeats a request whose answer was lost, so the existing name may be this process's own link.
            if not os.path.samefile(staged, final):
                return False
        fsync(final.parent)
        return True

    def remove(self, digest: str) -> int:
        """Remove the files of the key that has a digest; return the bytes freed."""
        folder = self._samples / digest[:3]
        older = folder.glob(f"{digest}.g*.safetensors") if self._has_generations else ()
        return sum(map(remove, (folder / f"{digest}.safetensors", *older)))

    def staging_files(self) -> list[Path]:
        return list(self._staging.iterdir())

    def _list_generations(self, key: str) -> list[Path]:
        digest = sample_key(key)
        return list((self._samples / digest[:3]).glob(f"{digest}.g*.safetensors"))

    def _agree_on_identity(self) -> dict[str, Any]:
        """Return the store's identity, written by the first process."""
        path = self.root / STORE_FILE
        if not path.exists():
            identity = {"schema": STORE_SCHEMA, "store_id": uuid.uuid4().hex, "sealed_by": "sha256"}
            sealed = {**identity, "seal": seal(canonical_json(identity).encode())}
            with self.stage() as staged:
                staged.write_text(json.dumps(sealed, indent=2) + "\n")
                fsync(staged)
                self.publish(staged, path)
        try:
            identity = read_json(path)
            found, kind = str(identity.pop("seal")), str(identity["sealed_by"])
            known = identity["schema"] in (STORE_SCHEMA, _STORE_SCHEMA_BEFORE) and str(identity["store_id"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} cannot be read ({error!r}): it is truncated or altered") from error
        if not known:
            raise StoreError(f"{path} has schema {identity['schema']!r}, expected {STORE_SCHEMA!r}")
        require_seal(kind, found, canonical_json(identity).encode(), str(path))
        return identity


def _generation_of(path: Path) -> int:
    """Return the generation in a file's name; above all others for a file that has none."""
    match = _FILE_NAME.fullmatch(path.name)
    return int(match[2]) if match is not None and match[2] else 1 << 63


def age_s(path: Path) -> float:
    """Return the seconds since a file was last written; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def file_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def remove(path: Path) -> int:
    """Remove a file, which another process may do at the same time; return the bytes freed."""
    size = file_size(path)
    with suppress(FileNotFoundError):
        path.unlink()
        return size
    return 0
