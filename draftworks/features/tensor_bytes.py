"""The bytes of tensors: their record, their checksum, and tensors over bytes that were read."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.specs import dtype_name

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
