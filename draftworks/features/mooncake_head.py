"""What a Mooncake store remembers of an entry, and the keys of its tensors."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from draftworks.errors import StoreError
from draftworks.features.tensor_bytes import TensorRecord
from draftworks.mooncake.client import MAX_SMALL_BYTES

_KEY = re.compile(r"(?P<store>[^/]+)/(?P<entry>[^/]+)/g(?P<generation>\d+)/(?P<name>[^/]+)")
_CRC_DIGITS = 8


@dataclass(frozen=True)
class Head:
    """The current generation of an entry, and its tensors by name."""

    generation: int
    tensors: Mapping[str, TensorRecord]

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.tensors.values())

    def to_bytes(self, where: str) -> bytes:
        tensors = {name: asdict(record) for name, record in self.tensors.items()}
        content = json.dumps({"generation": self.generation, "tensors": tensors}).encode()
        if len(content) + _CRC_DIGITS > MAX_SMALL_BYTES:
            raise StoreError(f"{where}: {len(self.tensors)} features at once are more than the store can describe")
        return _seal(content) + content

    @classmethod
    def from_bytes(cls, content: bytes) -> Head | None:
        """Parse a head; None if it is damaged, as one that is removed while it travels may be."""
        if content[:_CRC_DIGITS] != _seal(content[_CRC_DIGITS:]):
            return None
        fields = json.loads(content[_CRC_DIGITS:])
        tensors = {
            name: TensorRecord(**{**record, "shape": tuple(record["shape"])})
            for name, record in fields["tensors"].items()
        }
        return cls(fields["generation"], tensors)


@dataclass(frozen=True)
class ObjectKey:
    """The key of a tensor, taken apart. `name` is quoted."""

    entry: str
    generation: int
    name: str

    @classmethod
    def parse(cls, key: str, store_id: str) -> ObjectKey | None:
        """Return None for what is no tensor of this store."""
        match = _KEY.fullmatch(key)
        if match is None or match["store"] != store_id:
            return None
        return cls(match["entry"], int(match["generation"]), match["name"])


def _seal(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)
