"""Shards as objects: the file format of `shards`, whose tensors lie in the order in which they were put.

The tensors of a sample are put together, so they are neighbours in the object, and one request reads them.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.errors import StoreError
from draftworks.features.shards import (
    DTYPE_NAMES,
    SHARD_SCHEMA,
    ShardEntry,
    ShardHeader,
    content_digest,
    tensor_checksum,
)
from draftworks.features.specs import dtype_name
from draftworks.features.tensor_bytes import ALIGNMENT, align, compute_checksum, view_bytes

if TYPE_CHECKING:
    from torch import Tensor

_CODES = {name: code for code, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8


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
    for key, tensor in tensors.items():
        if dtype_name(tensor) not in _CODES:
            raise StoreError(f"key {key}: expected a dtype of {', '.join(_CODES)}, found {dtype_name(tensor)}")
    entries: dict[str, PlacedEntry] = {}
    end = 0
    for key, tensor in tensors.items():
        checksum, quick = tensor_checksum(tensor), compute_checksum(view_bytes(tensor))
        entries[key] = PlacedEntry(dtype_name(tensor), tuple(tensor.shape), tensor.nbytes, checksum, end, quick)
        end += tensor.nbytes
    name = content_digest(entries)
    preamble = _encode_preamble(name, entries)
    content = bytearray(len(preamble) + end)
    content[: len(preamble)] = preamble
    placed = {}
    for key, entry in entries.items():
        start = len(preamble) + entry.start
        if entry.nbytes:
            content[start : start + entry.nbytes] = view_bytes(tensors[key]).numpy().data
        placed[key] = replace(entry, start=start)
    path = Path(f"{name}-{uuid.uuid4().hex[:12]}.safetensors")
    return EncodedShard(ShardHeader(path, name, placed, len(content)), content)


def _encode_preamble(name: str, entries: Mapping[str, PlacedEntry]) -> bytes:
    metadata = {
        "schema": SHARD_SCHEMA,
        "digest": name,
        "checksums": json.dumps({key: entry.checksum for key, entry in entries.items()}),
    }
    fields: dict[str, Any] = {"__metadata__": metadata}
    for key, entry in entries.items():
        offsets = [entry.start, entry.start + entry.nbytes]
        fields[key] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = align(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES
    assert (_LENGTH_BYTES + length) % ALIGNMENT == 0
    return struct.pack("<Q", length) + text.ljust(length)


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
