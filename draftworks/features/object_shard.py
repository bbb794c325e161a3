"""Shards as objects: the file format of `shards`, whose tensors lie in the order in which they were put.

The tensors of a sample are put together, so they are neighbours in the object, and one request reads them into one buffer.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftworks.features.shards import ShardEntry, ShardHeader, content_digest, describe_tensor, encode_preamble
from draftworks.features.tensor_bytes import align, compute_checksum, require_dtype, view_bytes

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
