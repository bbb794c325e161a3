"""A draft's GGUF file as metadata and tensors, from which gates and readers begin; what it says is not judged here.

Bytes are read by the header alone and unpacked by the formats' definitions, with no code of what writes such files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.export.conventions import GGUF_PROVENANCE, PROVENANCE
from draftworks.export.readers.arithmetic import RopeTable, make_rope_table
from draftworks.export.readers.reader import ExportFolder
from draftworks.storage.files import require_file
from draftworks.targets.gguf_header import GgufTensor, read_gguf_header

DRAFT_FILE = "draft.gguf"
_BLOCK = 32
"""Numbers of a block of Q8_0: a scale in half precision, then one byte for each."""


def read_gguf_folder(path: Path) -> ExportFolder:
    """Return metadata and tensors of a folder's draft; quantised ones in float32, others in the dtype of the file.

    Raises:
        StoreError: the file is missing, damaged, or holds a tensor of a kind that no export here writes.
    """
    file = path / DRAFT_FILE
    try:
        header = read_gguf_header(require_file(file))
    except FileNotFoundError:
        raise StoreError(f"{path}: expected {DRAFT_FILE}, found no such file") from None
    content = np.memmap(file, dtype=np.uint8, mode="r")
    tensors = {each.name: _unpack(file, content, each) for each in header.tensors}
    return ExportFolder(path, _read_metadata(file, header.metadata), tensors)


def _read_metadata(file: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(metadata)
    if GGUF_PROVENANCE in found:
        try:
            found[PROVENANCE] = json.loads(found.pop(GGUF_PROVENANCE))
        except (TypeError, ValueError) as error:
            raise StoreError(f"{file}: {GGUF_PROVENANCE} is no JSON: {error}") from error
    return found


def _unpack(file: Path, content: np.ndarray, tensor: GgufTensor) -> Tensor:
    kind = "unknown" if tensor.packing is None else tensor.packing.name
    if kind not in _UNPACK:
        raise StoreError(
            f"{file}: {tensor.name}: expected one of {', '.join(_UNPACK)}, found type {tensor.kind}, {kind}"
        )
    packed = torch.from_numpy(np.array(content[tensor.start : tensor.start + tensor.nbytes]))
    return _UNPACK[kind](packed).reshape(tensor.shape)


def _unpack_blocks(packed: Tensor) -> Tensor:
    blocks = packed.view(-1, 2 + _BLOCK)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()  # (blocks, 1)
    return scales * blocks[:, 2:].contiguous().view(torch.int8).float()


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda packed: packed.view(torch.float32),
    "BF16": lambda packed: packed.view(torch.bfloat16),
    "I64": lambda packed: packed.view(torch.int64),
    "Q8_0": _unpack_blocks,
}


def read_gguf_rope(folder: ExportFolder, architecture: str, head_dim: int) -> RopeTable:
    """Return the frequencies as llama.cpp computes them: divided by `rope_freqs` where the file has it, or scaled by name."""
    prefix = f"{architecture}.rope."
    scaling = {
        "rope_type": folder.config.get(f"{prefix}scaling.type", "default"),
        "rope_theta": folder.config[f"{prefix}freq_base"],
        "factor": folder.config.get(f"{prefix}scaling.factor"),
        "original_max_position_embeddings": folder.config.get(f"{prefix}scaling.original_context_length"),
        "beta_fast": folder.config.get(f"{prefix}scaling.yarn_beta_fast"),
        "beta_slow": folder.config.get(f"{prefix}scaling.yarn_beta_slow"),
    }
    table = make_rope_table({name: value for name, value in scaling.items() if value is not None}, head_dim)
    divisors = folder.tensors.get("rope_freqs.weight")
    return table if divisors is None else RopeTable(table.inverse / divisors.double(), table.scaling)


def turn_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Return rows (heads · D, columns) of which llama.cpp turns 2i with 2i + 1 in the order that turns i with i + D/2."""
    heads = weight.unflatten(0, (-1, head_dim))
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)
