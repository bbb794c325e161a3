"""Files of the optimizer's moments, in the safetensors format of torch.distributed.checkpoint (DCP), without DCP.

Each rank has a file, whose header says where in the whole tensors its pieces begin. A process alone reads and writes such
files here: DCP itself takes a second to import, most of it DTensor and sympy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage.files import require_file

OFFSETS, SAVED_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
HEADER = {"DCP_VERSION": "1.0", "format": "pt"}


def name_shard(index: int) -> str:
    """Return the name of a rank's file, as DCP has it; ranks are counted from 1 there."""
    return f"shard-{index:05}-model-00001-of-00001.safetensors"


def write_shard(folder: Path, index: int, pieces: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> None:
    """Write the file of a rank without syncing: the caller syncs and digests all files of a checkpoint together.

    Raises:
        StoreError: it cannot be written.
    """
    path = folder / name_shard(index)
    info = {name: {SAVED_OFFSETS: list(begin)} for name, begin in offsets.items()}
    tensors = {name: piece.detach().cpu().contiguous() for name, piece in pieces.items()}
    try:
        save_file(tensors, path, metadata={OFFSETS: json.dumps(info), **HEADER})
    except SafetensorError as error:  # also raised for a full disk
        raise StoreError(f"{path}: cannot be written: {error}") from error


def save_whole_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Write the moments of a process alone. Raises StoreError if they cannot be written."""
    write_shard(folder, 1, moments, {name: [0] * moment.dim() for name, moment in moments.items()})


def load_whole_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Fill the moments of a process alone from the files of any number of ranks.

    Raises:
        StoreError: a moment is missing or of another shape, or a file is damaged.
    """
    filled: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(require_file(path), "pt") as file:
                begins = json.loads(file.metadata()[OFFSETS])
                for name in moments.keys() & set(file.keys()):
                    piece = file.get_tensor(name)
                    _fill(moments[name], piece, begins[name][SAVED_OFFSETS], f"{folder}: {name}")
                    filled[name] += piece.numel()
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read as moments: {type(error).__name__}: {error}") from error
    for name, moment in moments.items():
        if filled[name] != moment.numel():
            found = f"{filled[name]} of them" if filled[name] else "none"
            raise StoreError(f"{folder}: {name}: expected {moment.numel()} values {list(moment.shape)}, found {found}")


def _fill(moment: Tensor, piece: Tensor, begin: Sequence[int], where: str) -> None:
    """Copy a piece to its place in a moment. Raises StoreError if it does not fit there."""
    place = moment[tuple(slice(start, start + length) for start, length in zip(begin, piece.shape, strict=True))]
    if place.shape != piece.shape:
        raise StoreError(
            f"{where}: expected shape {list(moment.shape)}, found a piece of {list(piece.shape)} at {list(begin)}"
        )
    place.copy_(piece)
