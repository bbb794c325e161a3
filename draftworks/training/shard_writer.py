"""torch's sharded safetensors format, written straight from memory.

`HuggingFaceStorageWriter` first makes one bytes object of everything, which costs the memory twice and a good part of the
time. The files are the same, and `HuggingFaceStorageReader` reads them; the keys of their headers are torch's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from draftworks.errors import StoreError


class ShardWriter(HuggingFaceStorageWriter):
    """One file per rank, not synced: the caller syncs and digests all files of a checkpoint together."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises StoreError: the file cannot be written."""
        tensors, offsets = {}, {}
        for item in plan.items:
            tensors[item.index.fqn] = _on_cpu(planner.resolve_data(item))
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        if tensors:
            header = {CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
            path = self._folder / _gen_file_name(1, 1, plan.storage_data["shard_index"])
            try:
                save_file(tensors, path, metadata={**header, FORMAT_KEY: FORMAT_VALUE})
            except SafetensorError as error:  # a full disk too: it is no OSError
                raise StoreError(f"{path}: cannot be written: {error}") from error
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, item.tensor_data.size.numel(), None) for item in plan.items])
        return written


def _on_cpu(tensor: torch.Tensor | object) -> Tensor:
    assert isinstance(tensor, Tensor)  # only tensors are saved this way; counters are JSON
    return tensor.detach().cpu().contiguous()
