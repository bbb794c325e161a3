"""The objects of a feature store in object storage: shards, and the index that says what is stored.

A shard is a file of `shards`, whose tensors lie in the order in which they were put. The tensors of a sample are put
together, so they are neighbours in the object, and one request reads them into one buffer.

The index is a log of immutable objects, each made after what it names.

    index/0000000000.json    what the first change added and freed; then 0000000001, and so on without a gap
    index/head.json          the newest summary and the change that follows it; swapped by condition
    index/until-N-ID.json    summary of all changes before N

A change is in force when its object exists. Whoever adds one creates the object of the next number; where another
process was faster, its change is read first. So all processes see one order of changes, nobody lists anything, and a
writer killed at any moment has made its change or not.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftworks.errors import StoreError
from draftworks.features.shards import (
    ShardEntry,
    ShardHeader,
    ShardIndex,
    content_digest,
    describe_tensor,
    encode_preamble,
)
from draftworks.features.tensor_bytes import align, compute_checksum, require_dtype, view_bytes
from draftworks.storage.files import parse_json
from draftworks.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PlacedEntry(ShardEntry):
    """A tensor of a shard, the byte of the object at which it begins, and a checksum that every reading compares."""

    start: int = 0
    quick: int = 0


@dataclass(frozen=True)
class EncodedShard:
    """A shard that is about to be written. Its name has a part of its own, so no two writers mean one object."""

    header: ShardHeader
    content: bytearray


def encode_shard(tensors: Mapping[str, Tensor]) -> EncodedShard:
    """Return the object that holds contiguous tensors in main memory, in their order.

    Raises:
        StoreError: a tensor is of a dtype that shards do not have.
    """
    entries = {key: describe_tensor(key, tensor) for key, tensor in tensors.items()}
    name = content_digest(entries)
    preamble = encode_preamble(name, entries)
    content = bytearray(len(preamble) + sum(entry.nbytes for entry in entries.values()))
    content[: len(preamble)] = preamble
    placed, start = {}, len(preamble)
    for key, entry in entries.items():
        flat = view_bytes(tensors[key])
        if entry.nbytes:
            content[start : start + entry.nbytes] = flat.numpy().data
        placed[key] = PlacedEntry(**vars(entry), start=start, quick=compute_checksum(flat))
        start += entry.nbytes
    path = Path(f"{name}-{uuid.uuid4().hex[:12]}.safetensors")
    return EncodedShard(ShardHeader(path, name, placed, len(content)), content)


def header_to_json(header: ShardHeader) -> dict[str, Any]:
    """Return what a reader has to know of a shard: its name, its length and where each tensor lies."""
    entries = {
        key: [e.dtype, list(e.shape), e.nbytes, e.checksum, e.start, e.quick]
        for key, e in header.entries.items()
        if isinstance(e, PlacedEntry)
    }
    return {"name": header.path.name, "digest": header.digest, "bytes": header.expected_bytes, "entries": entries}


def header_from_json(value: dict[str, Any]) -> ShardHeader:
    """Return the header again. Raises KeyError, TypeError or ValueError if the value is none."""
    entries = {
        key: PlacedEntry(dtype, tuple(shape), nbytes, checksum, start, quick)
        for key, (dtype, shape, nbytes, checksum, start, quick) in value["entries"].items()
    }
    return ShardHeader(Path(value["name"]), value["digest"], entries, value["bytes"])


NAME_LENGTH = 40


class SampleBytes:
    """Where features lie in a buffer of `nbytes`: in their order, each at a multiple of `ALIGNMENT`."""

    def __init__(self, entries: Mapping[str, PlacedEntry]) -> None:
        self.entries = entries
        self._starts: dict[str, int] = {}
        end = 0
        for key, entry in entries.items():
            self._starts[key] = end
            end = align(end + entry.nbytes)
        self.nbytes = end

    @property
    def name(self) -> str:
        """A name that no other content has: features by key and checksum, in their order."""
        return sha256("".join(f"{key}-{e.checksum}\n" for key, e in self.entries.items()).encode()).hexdigest()[
            :NAME_LENGTH
        ]

    def join(self, parts: Sequence[Any]) -> bytearray:
        """Return one buffer with the bytes of each feature that has any."""
        content, left = bytearray(self.nbytes), iter(parts)
        for key, entry in self.entries.items():
            if entry.nbytes:
                start = self._starts[key]
                content[start : start + entry.nbytes] = memoryview(next(left))
        return content

    def find_altered(self, content: bytearray) -> str | None:
        """Return the key of a feature that is not as it was stored; None if all are."""
        for key, entry in self.entries.items():
            if entry.nbytes and compute_checksum(self._view(content, key, torch.uint8)) != entry.quick:
                return key
        return None

    def restore(self, content: bytearray) -> dict[str, Tensor]:
        """Return the features over a buffer that nobody else may change."""
        return {
            key: self._view(content, key, require_dtype(entry.dtype)).view(entry.shape)
            for key, entry in self.entries.items()
        }

    def _view(self, content: bytearray, key: str, dtype: torch.dtype) -> Tensor:
        entry = self.entries[key]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=self._starts[key])


INDEX_SCHEMA = "draftworks.object_index.1"
HEAD = "index/head.json"
SUMMARY_AFTER = 64
"""Changes between two summaries at least; later a quarter of all."""
READ_AT_ONCE = 16


@dataclass(frozen=True)
class IndexChange:
    """What one change does: shards that are there now, keys of shards that were freed, shards that are gone."""

    added: tuple[ShardHeader, ...] = ()
    freed: Mapping[Path, frozenset[str]] = field(default_factory=dict)
    removed: tuple[Path, ...] = ()

    def encode(self, writer: str, number: int) -> bytes:
        """Return the change as an object's content: a line with the digest of the rest, and JSON."""
        value = {
            "schema": INDEX_SCHEMA,
            "writer": writer,
            "number": number,
            "added": [header_to_json(header) for header in self.added],
            "freed": {path.name: sorted(keys) for path, keys in self.freed.items()},
            "removed": [path.name for path in self.removed],
        }
        return _seal(value)

    @classmethod
    def decode(cls, content: bytes, where: str) -> IndexChange:
        """Return the change of an object. Raises StoreError if it is damaged or of another schema."""
        value = _unseal(content, where)
        try:
            return cls(
                tuple(header_from_json(each) for each in value["added"]),
                {Path(name): frozenset(keys) for name, keys in value["freed"].items()},
                tuple(Path(name) for name in value["removed"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{where}: not a change of an index of features ({error})") from error


class ObjectIndex:
    """What a store holds, as far as the changes were read. Its store's lock protects it."""

    def __init__(self, objects: ObjectStore, summary_after: int = SUMMARY_AFTER) -> None:
        self._objects = objects
        self._summary_after = summary_after
        self._next = 0
        self._summarized = 0
        self._opened = False
        self.shards = ShardIndex()

    @property
    def changes(self) -> int:
        """Number of changes that were read."""
        return self._next

    def refresh(self) -> None:
        """Read the changes that others have made since. One request if there are none."""
        if not self._opened:
            self._read_summary()
            self._opened = True
        while (found := self._objects.find(_name(self._next))) is not None:
            self._apply(found.content)
            self._read_many()

    def append(self, make: Callable[[], IndexChange | None]) -> None:
        """Make a change: after this call all processes see it.

        Args:
            make: returns the change by what is known now, called again after others have made theirs; None: none is
                needed any more.
        """
        writer = uuid.uuid4().hex
        while (change := make()) is not None:
            content = change.encode(writer, self._next)
            name = _name(self._next)
            if not self._objects.create(name, content):
                found = self._objects.read(name).content
                if found != content:  # not this very change, whose answer was lost
                    self._apply(found)
                    self._read_many()
                    continue
            self._apply(content)
            break
        if self._next - self._summarized >= max(self._summary_after, self._next // 4):
            self._write_summary()

    def _read_many(self) -> None:
        """Read as many further changes as there are, several at a time."""
        with ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="index") as pool:
            while True:
                names = [_name(self._next + ahead) for ahead in range(READ_AT_ONCE)]
                for found in pool.map(self._objects.find, names):
                    if found is None:
                        return
                    self._apply(found.content)

    def _apply(self, content: bytes) -> None:
        change = IndexChange.decode(content, self._objects.locate(_name(self._next)))
        self._admit(change)
        self._next += 1

    def _admit(self, change: IndexChange) -> None:
        for header in change.added:
            self.shards.add(header)
        for path, keys in change.freed.items():
            header = self.shards.find(path)
            if header is not None:
                self.shards.add(header, self.shards.freed.get(path, frozenset()) | keys)
        for path in change.removed:
            if self.shards.find(path) is not None:
                self.shards.remove(path)

    def _read_summary(self) -> None:
        head = self._objects.find(HEAD)
        if head is None:
            return
        where = self._objects.locate(HEAD)
        value = _unseal(head.content, where)
        name, until = value.get("summary"), value.get("until")
        if not isinstance(name, str) or not isinstance(until, int):
            raise StoreError(f"{where}: expected the name of a summary, found {str(value)[:100]}")
        path = f"index/{name}"
        self._admit(IndexChange.decode(self._objects.read(path).content, self._objects.locate(path)))
        self._next = self._summarized = until

    def _write_summary(self) -> None:
        """Write what is known, and let the head name it unless it names a later one."""
        until, writer = self._next, uuid.uuid4().hex
        summary = IndexChange(tuple(self.shards.headers), self.shards.freed)
        name = f"until-{until}-{writer[:12]}.json"
        self._objects.create(f"index/{name}", summary.encode(writer, until))
        head = _seal({"schema": INDEX_SCHEMA, "summary": name, "until": until})
        for _ in range(3):  # whoever is faster has a summary as good
            found = self._objects.find(HEAD)
            if found is not None and _unseal(found.content, self._objects.locate(HEAD)).get("until", 0) >= until:
                break
            if self._objects.swap(HEAD, head, None if found is None else found.version):
                break
        self._summarized = until


def _name(number: int) -> str:
    return f"index/{number:010d}.json"


def _seal(value: dict[str, Any]) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    return sha256(body).hexdigest().encode() + b"\n" + body


def _unseal(content: bytes, where: str) -> dict[str, Any]:
    seal, _, body = content.partition(b"\n")
    if sha256(body).hexdigest().encode() != seal:
        raise StoreError(f"{where} is damaged: its content does not have the digest in its first line")
    value = parse_json(body)
    if not isinstance(value, dict) or value.get("schema") != INDEX_SCHEMA:
        raise StoreError(f"{where}: expected an object of the schema {INDEX_SCHEMA}")
    return value
