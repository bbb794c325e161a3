"""Features that are read together, side by side in one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from draftworks.features.object_shard import PlacedEntry
from draftworks.features.tensor_bytes import align, compute_checksum, require_dtype

if TYPE_CHECKING:
    from torch import Tensor

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
