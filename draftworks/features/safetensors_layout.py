"""Files of safetensors written from the tensors' own memory, and hashes of tensors. Needs torch only to look at tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from draftworks.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

LENGTH_BYTES = 8
_ALIGNMENT = 64


DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names of the dtypes in a header."""
_CODES = {name: code for code, name in DTYPE_NAMES.items()}


class TensorPlace(Protocol):
    """What a header says of a tensor; `dtype` is torch's name."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


def require_code(dtype: str, where: str) -> str:
    """Return the code of a dtype in a header, such as `BF16`. Raises StoreError that begins with `where` if it has none."""
    if dtype not in _CODES:
        raise StoreError(f"{where}: expected a dtype of {', '.join(_CODES)}, found {dtype}")
    return _CODES[dtype]


def lay_out(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the order of a file: wide elements first, so that each begins at a multiple of its element; then by key."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def encode_safetensors_header(metadata: Mapping[str, str], places: Mapping[str, TensorPlace]) -> bytes:
    """Return length and header of a file whose tensors follow one after the other, in this order, from a multiple of 64 bytes on.

    The text is compact JSON in ASCII.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key, place in places.items():
        offsets = [end, end + place.nbytes]
        fields[key] = {"dtype": require_code(place.dtype, key), "shape": list(place.shape), "data_offsets": offsets}
        end += place.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = -(-(LENGTH_BYTES + len(text)) // _ALIGNMENT) * _ALIGNMENT - LENGTH_BYTES
    return struct.pack("<Q", length) + text.ljust(length)


def view_buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in main memory, without a copy."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def xxh3_of(tensor: Tensor) -> str:
    """Return XXH3 of 128 bits of a tensor's bytes in row-major order, in hex. It finds damage at memory speed, and no forgery."""
    return xxhash.xxh3_128(view_buffer(tensor)).hexdigest()


def sha256_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order, in hex."""
    return sha256(view_buffer(tensor)).hexdigest()
