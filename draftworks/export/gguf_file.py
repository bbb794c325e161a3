"""Writes a draft as a GGUF file by the library `gguf`: kinds of numbers and of tensors as llama.cpp's loader asks for them.

llama.cpp multiplies by matrices of any kind, and by vectors and small kernels in float32 only: these are written so, rounded
to the dtype of the export all the same, so that a draft computes the same in all formats of a dtype.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftworks.config.exports import Quantisation
from draftworks.errors import ConfigError
from draftworks.export.canonical import round_tensor
from draftworks.export.conventions import GGUF_PROVENANCE

_BLOCK = 32
"""Numbers of a block of q8_0."""
ARCHITECTURE = "general.architecture"
FILE_TYPES = {torch.float32: 0, torch.bfloat16: 32, "q8_0": 7}
"""Values of `general.file_type`, `enum llama_ftype` of llama.h."""


@dataclass(frozen=True)
class Rounding:
    """In what matrices and other tensors are held.

    Attributes:
        dtype: of everything that is not quantised.
        quantised: kind of matrices whose rows are whole blocks; None for none.
    """

    dtype: torch.dtype
    quantised: Quantisation | None = None

    @property
    def file_type(self) -> int:
        return FILE_TYPES[self.quantised or self.dtype]

    def quantises(self, tensor: Tensor) -> bool:
        return self.quantised is not None and is_matrix(tensor) and tensor.shape[-1] % _BLOCK == 0

    def hold(self, tensor: Tensor) -> Tensor:
        """Return what is left of a tensor: rounded, in the dtype in which the file gives it back."""
        if self.quantises(tensor):
            return torch.from_numpy(_dequantise(_quantise(tensor)))
        rounded = round_tensor(tensor, self.dtype)
        return rounded if is_matrix(tensor) or not tensor.is_floating_point() else rounded.float()


def is_matrix(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim == 2


def require_gguf(where: str) -> None:
    """Raise ConfigError if the library that writes these files is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{where}: writing GGUF needs the package gguf, which is not installed: pip install -e '.[gguf]'"
        )


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    rounding: Rounding,
    provenance: Mapping[str, Any],
) -> None:
    """Write one file: metadata in its order, then the tensors.

    Raises:
        ConfigError: the library is not installed.
    """
    require_gguf(str(path))
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, metadata[ARCHITECTURE])
    for name, value in metadata.items():
        if name != ARCHITECTURE:
            _add_value(writer, name, value)
    writer.add_string(GGUF_PROVENANCE, json.dumps(provenance))
    for name, tensor in tensors.items():
        if rounding.quantises(tensor):
            writer.add_tensor(name, _quantise(tensor), raw_dtype=GGMLQuantizationType.Q8_0)
        elif (held := rounding.hold(tensor)).dtype == torch.bfloat16:
            packed = held.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, held.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_single(value: float) -> float:
    """Return the number as single precision holds it, in which all of a file's numbers are."""
    return float(np.float32(value))


def _add_value(writer: Any, name: str, value: Any) -> None:
    """Add a key. llama.cpp refuses a size that is not an unsigned integer, and takes arrays of either sign."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _quantise(tensor: Tensor) -> np.ndarray:
    from gguf import GGMLQuantizationType, quantize

    return quantize(tensor.float().contiguous().numpy(), GGMLQuantizationType.Q8_0)


def _dequantise(packed: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(packed, GGMLQuantizationType.Q8_0)
