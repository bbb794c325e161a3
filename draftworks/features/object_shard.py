"""Shards as objects: the file format of `shards`, whose tensors lie in the order in which they were put.

The tensors of a sample are put together, so they are neighbours in the object, and one request reads them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.features.shards import ShardEntry, ShardHeader, content_digest, describe_tensor, encode_preamble
from draftworks.features.tensor_bytes import compute_checksum, view_bytes

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
