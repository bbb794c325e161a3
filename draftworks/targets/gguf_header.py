"""Header of a GGUF file: metadata, and names, kinds, shapes and places of its tensors. Standard library only.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from draftworks.errors import StoreError
from draftworks.storage.files import open_regular

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` of values of a fixed size, by type; the others are texts and arrays."""
_TEXT, _ARRAY = 8, 9
_MOST_ENTRIES, _MOST_DIMENSIONS = 1 << 20, 8
_ALIGNMENT = 32


@dataclass(frozen=True)
class Packing:
    """How a kind of tensor is stored: `elements` weights in each `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


PACKINGS = {
    number: Packing(name, elements, nbytes)
    for number, name, elements, nbytes in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (28, "F64", 1, 8)),
        *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8)),
        *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
        *((8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110)),
        *((12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292)),
        *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
        *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136)),
        *((29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17)),
    )
}
"""By number, as `enum ggml_type` of ggml.h has them."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        kind: number of its type; `packing` is None for one that is not known here.
        shape: outermost dimension first, as in PyTorch; the file has it the other way round.
        start: of its bytes in the file.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    start: int
    packing: Packing | None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; 0 if its kind is not known."""
        if self.packing is None:
            return 0
        return math.prod(self.shape) // self.packing.elements * self.packing.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """What a file says of itself before its weights."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: tuple[GgufTensor, ...] = field(repr=False)

    @property
    def architecture(self) -> str:
        """Name of the architecture, as llama.cpp knows it; empty if the file gives none."""
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else ""


def is_gguf(model: str | Path) -> bool:
    """Whether a model's path is that of a GGUF file."""
    return str(model).lower().endswith(SUFFIX)


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the whole header. Raises StoreError if the file is no GGUF file, is cut or describes what it does not hold."""
    return _read(path, _read_all)


def read_gguf_metadata(path: Path, enough: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Return the metadata up to where it is enough: the sizes of a model stand before its vocabulary, which is long.

    Of an array of texts that follows only the length is read, as an integer, before `enough` is asked again.

    Raises:
        StoreError: as `read_gguf_header`.
    """
    return _read(path, lambda reader: reader.read_metadata(enough))


def _read(path: Path, read: Callable[[_Reader], Any]) -> Any:
    try:
        with open_regular(path) as stream:
            return read(_Reader(path, stream, os.fstat(stream.fileno()).st_size))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_all(reader: _Reader) -> GgufHeader:
    metadata = reader.read_metadata()
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise reader.make_error(f"its general.alignment is {alignment!r}")
    tensors = reader.read_tensors(alignment)
    reader.require_extent(tensors)
    return GgufHeader(reader.path, metadata, tensors)


class _Reader:
    """Reads one header from its beginning; every length is compared with the file's before it is believed."""

    def __init__(self, path: Path, stream: BufferedReader, size: int) -> None:
        self.path, self._stream, self._left, self._size = path, stream, size, size
        magic = self._take(min(4, size))
        if magic != _MAGIC:
            raise StoreError(f"{path}: expected a GGUF file, found one that begins with {magic!r}")
        version = self._number("I")
        if version not in _VERSIONS:
            raise self.make_error(f"it has version {version}, expected {' or '.join(map(str, _VERSIONS))}")
        self._tensors, self._entries = self._number("Q"), self._number("Q")
        if max(self._tensors, self._entries) > _MOST_ENTRIES:
            raise self.make_error(f"it counts {self._tensors} tensors and {self._entries} keys")

    def make_error(self, problem: str) -> StoreError:
        return StoreError(f"{self.path}: not a readable GGUF file: {problem}. Copy or download it again")

    def read_metadata(self, enough: Callable[[Mapping[str, Any]], bool] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._entries):
            name, kind = self._text(), self._number("I")
            if enough is not None and kind == _ARRAY:
                place = self._stream.tell()
                inner, length = self._number("I"), self._number("Q")
                if inner == _TEXT and enough({**found, name: length}):
                    return {**found, name: length}
                self._left += self._stream.tell() - place
                self._stream.seek(place)
            found[name] = self._value(kind)
            if enough is not None and enough(found):
                break
        return found

    def read_tensors(self, alignment: int) -> tuple[GgufTensor, ...]:
        rows = []
        for _ in range(self._tensors):
            name, dimensions = self._text(), self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise self.make_error(f"the tensor {name!r:.80} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))
            rows.append((name, shape[::-1], self._number("I"), self._number("Q")))
        start = -(-(self._size - self._left) // alignment) * alignment
        return tuple(
            GgufTensor(name, kind, shape, start + offset, PACKINGS.get(kind)) for name, shape, kind, offset in rows
        )

    def require_extent(self, tensors: Collection[GgufTensor]) -> None:
        """Raise StoreError if a tensor ends after the file, or its rows are no whole blocks."""
        for each in tensors:
            if each.packing is not None and each.shape and each.shape[-1] % each.packing.elements:
                raise self.make_error(f"rows of {each.shape[-1]} weights of {each.name!r:.80} are no whole blocks")
        end = max((each.start + each.nbytes for each in tensors), default=0)
        if end > self._size:
            raise self.make_error(f"its tensors end at byte {end:,}, and it has {self._size:,}: it is cut")

    def _value(self, kind: int) -> Any:
        if kind in _FIXED:
            return self._number(_FIXED[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise self.make_error(f"its metadata has a value of type {kind}")
        inner, length = self._number("I"), self._number("Q")
        if inner == _TEXT:
            return [self._text() for _ in range(self._require_room(length, 8))]
        if inner not in _FIXED:
            raise self.make_error(f"its metadata has an array of type {inner}")
        width = struct.calcsize(f"<{_FIXED[inner]}")
        return list(struct.unpack(f"<{length}{_FIXED[inner]}", self._take(self._require_room(length, width) * width)))

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _text(self) -> str:
        content = self._take(self._require_room(self._number("Q"), 1))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.make_error(f"its metadata has a text that is no UTF-8: {content[:40]!r}") from error

    def _require_room(self, count: int, width: int) -> int:
        if count * width > self._left:
            raise self.make_error(f"its header goes on beyond its {self._size:,} bytes: it is cut")
        return count

    def _take(self, count: int) -> bytes:
        content = self._stream.read(self._require_room(count, 1))
        self._left -= len(content)
        if len(content) < count:
            raise self.make_error("it became shorter while it was read")
        return content
