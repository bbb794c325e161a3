"""Streams in float8_e4m3fn with a float32 scale per token, in one tensor: a quarter of float32's bytes, half of bfloat16's.

A stream (S, H) is stored as float8_e4m3fn (S, H + 4): the last four bytes of a token are its scale, little-endian. As
this is one tensor under one key, every store keeps it as it keeps any other, checksums included.

The arithmetic is that of speculators 0.9.0 (`hs_connectors/fp8_utils.py`) with a scale for each stream, not one for all
streams of a token: the streams of deep layers are larger than those of shallow ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage.identity import SCALE_BYTES

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
