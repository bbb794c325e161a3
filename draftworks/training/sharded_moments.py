"""Moments of several ranks in files: torch.distributed.checkpoint, with a writer of our own.

`ShardWriter` writes its safetensors format straight from memory. torch's `HuggingFaceStorageWriter` first builds one
bytes object of everything, which doubles the memory and costs a good part of the time. The files are the same, and
`HuggingFaceStorageReader` reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from draftworks.errors import StoreError
from draftworks.training.moment_files import write_shard


class ShardWriter(HuggingFaceStorageWriter):
    """Writes one file per rank without syncing: the caller syncs and digests all files of a checkpoint together."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors. Raises StoreError if the file cannot be written."""
        tensors, offsets, results = {}, {}, []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert item.tensor_data is not None
            assert isinstance(tensor, Tensor)  # only tensors are saved this way; counters are JSON
            tensors[item.index.fqn] = tensor
            offsets[item.index.fqn] = item.tensor_data.chunk.offsets
            results.append(WriteResult(item.index, item.tensor_data.size.numel(), None))
        if tensors:
            write_shard(self._folder, plan.storage_data["shard_index"], tensors, offsets)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def save_sharded_moments(folder: Path, moments: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards. A collective.

    Raises:
        StoreError: on all ranks, what failed on any of them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code: typed storages
            dcp.save(dict(moments), storage_writer=ShardWriter(folder), process_group=group)
    except CheckpointException as error:
        raise StoreError(f"{folder}: {_first_cause(error)}") from error


def load_sharded_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards from the files of any number of ranks. A collective.

    Raises:
        StoreError: on all ranks: a moment is missing, or of another shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code: typed storages
            dcp.load(dict(moments), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise StoreError(f"{folder}: {_first_cause(error)}") from error


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
