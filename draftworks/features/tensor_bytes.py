"""The bytes of tensors: safetensors files written from their own memory, hashes, checksums, views, and streams in fp8.

In fp8 a stream is float8_e4m3fn with a float32 scale per token, in one tensor: a quarter of float32's bytes, half of
bfloat16's.

A stream (S, H) is stored as float8_e4m3fn (S, H + 4): the last four bytes of a token are its scale, little-endian. As
this is one tensor under one key, every store keeps it as it keeps any other, checksums included.

The arithmetic is that of speculators 0.9.0 (`hs_connectors/fp8_utils.py`) with a scale for each stream, not one for all
streams of a token: the streams of deep layers are larger than those of shallow ones.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.store_parts import dtype_name
from draftworks.storage.identity import SCALE_BYTES

ALIGNMENT = 64
_ROW_BYTES = 32 << 10


@dataclass(frozen=True)
class TensorRecord:
    """What a store that keeps plain bytes has to remember of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorRecord:
        """Describe a contiguous tensor in main memory."""
        return cls(dtype_name(tensor), tuple(tensor.shape), tensor.nbytes, compute_checksum(view_bytes(tensor)))

    def restore(self, content: Tensor) -> Tensor:
        """Return the tensor over its bytes (N,) uint8, which begin at a multiple of `ALIGNMENT` of their storage."""
        return content.view(require_dtype(self.dtype)).view(self.shape)


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes (N,) uint8 of a contiguous tensor, over the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def compute_checksum(content: Tensor) -> int:
    """Return 32 bits that tell bytes (N,) uint8 from others: sums of rows of 32 KiB, then a CRC of these and the rest.

    About ten times as fast as a CRC of everything. It detects lost, foreign and altered bytes, and no forgery.
    """
    array = content.numpy()
    whole = len(array) // _ROW_BYTES * _ROW_BYTES
    sums = array[:whole].view(np.int64).reshape(-1, _ROW_BYTES // 8).sum(axis=1)
    return zlib.crc32(array[whole:].tobytes(), zlib.crc32(sums.tobytes()))


def require_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as `bfloat16`. Raises StoreError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"expected the name of a dtype of torch, found {name!r}")
    return dtype


def align(nbytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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


STORED = "float8_e4m3fn"
DECODED = "bfloat16"
_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
MIN_SCALE = float(torch.tensor(1e-12))
"""Scale of a token whose values are all zero, or so small that they become zero; as float32 has it."""
MAX_SCALE = float(torch.tensor(torch.finfo(torch.float32).max) / _LARGEST)
_TOKENS_AT_ONCE = 256
"""Tokens that are converted at a time, to bound the float32 copies."""


def get_decoded_dtype(dtype: str) -> str:
    """Return the dtype in which a feature of a stored dtype reaches a reader."""
    return DECODED if dtype == STORED else dtype


def encode_stream(stream: Tensor) -> Tensor:
    """Return a stream (S, H) of any float dtype as float8_e4m3fn (S, H + 4), with its scales.

    The scale is the largest finite magnitude of the token over 448, at least `MIN_SCALE`. The relative error of a value
    is at most 2^-4 unless it is below 2^-6 scales; reading as bfloat16 adds up to 2^-8 of it. NaN and infinity become NaN (e4m3 has no infinity).

    Raises:
        ValueError: the stream is not (S, H).
    """
    if stream.dim() != 2:
        raise ValueError(f"expected a stream of shape (positions, hidden size), found {tuple(stream.shape)}")
    positions, width = stream.shape
    stored = torch.empty(positions, width + SCALE_BYTES, dtype=torch.uint8)
    for start in range(0, positions, _TOKENS_AT_ONCE):
        part = stream[start : start + _TOKENS_AT_ONCE].detach().cpu().float()  # (s, H)
        magnitudes = part.abs().nan_to_num(nan=0.0, posinf=0.0)
        scales = magnitudes.amax(dim=1, keepdim=True) if width else part.new_zeros(len(part), 1)
        scales = (scales / _LARGEST).clamp(min=MIN_SCALE)  # (s, 1)
        finite = (part / scales).clamp(-_LARGEST, _LARGEST).masked_fill(~part.isfinite(), torch.nan)
        stored[start : start + len(part), :width] = finite.to(torch.float8_e4m3fn).view(torch.uint8)
        stored[start : start + len(part), width:] = _to_little_endian(scales.contiguous().view(torch.uint8))
    return stored.view(torch.float8_e4m3fn)


def decode_stream(stored: Tensor, where: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the stream (S, H) of a tensor of `encode_stream`, float8_e4m3fn (S, H + 4), in memory of its own.

    Raises:
        StoreError: it is no such tensor, or a scale is not in MIN_SCALE to MAX_SCALE.
    """
    if stored.dtype != torch.float8_e4m3fn or stored.dim() != 2 or stored.shape[1] < SCALE_BYTES:
        raise StoreError(
            f"{where}: expected {STORED} of shape (positions, hidden size + {SCALE_BYTES}), found "
            f"{str(stored.dtype).removeprefix('torch.')} of shape {tuple(stored.shape)}"
        )
    width = stored.shape[1] - SCALE_BYTES
    stream = torch.empty(len(stored), width, dtype=dtype)
    scales = _to_little_endian(stored.view(torch.uint8)[:, width:]).contiguous().view(torch.float32)  # (S, 1)
    sound = (scales >= MIN_SCALE) & (scales <= MAX_SCALE)  # false for NaN too
    if not bool(sound.all()):
        position = int((~sound).flatten().nonzero()[0])
        raise StoreError(
            f"{where}: the scale of position {position} is {float(scales[position]):g}, expected {MIN_SCALE:g} to "
            f"{MAX_SCALE:.3g}: it was not stored by this software, or is altered. Free the feature and capture it again"
        )
    for start in range(0, len(stored), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        stream[part] = stored[part, :width].float() * scales[part]
    return stream


def round_stream(stream: Tensor) -> Tensor:
    """Return a stream (S, H) as it is read after it was stored: of its dtype, and of values that the encoding has."""
    return decode_stream(encode_stream(stream), "a stream", stream.dtype)


def decode_features(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the features of a sample with those decoded that are stored as float8_e4m3fn.

    Raises:
        StoreError: as `decode_stream`.
    """
    return {
        name: decode_stream(tensor, f"{where}, feature {name}") if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in tensors.items()
    }


def make_random_stored(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return normally distributed numbers as a feature of this stored shape and dtype."""
    if dtype == STORED:
        return encode_stream(torch.randn(shape[0], shape[1] - SCALE_BYTES))
    return torch.randn(shape).to(getattr(torch, dtype))


def _to_little_endian(scales: Tensor) -> Tensor:
    """Return the bytes (S, 4) of scales with the order of this machine's bytes exchanged for the stored one, or back."""
    import sys

    return scales if sys.byteorder == "little" else scales.flip(1)
