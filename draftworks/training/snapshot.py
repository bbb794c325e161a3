"""The state of a training between two optimizer steps, and how its tensors are stored.

Weights are stored whole in plain safetensors, since other programs read them. The optimizer's moments are stored
sharded in torch.distributed.checkpoint's safetensors format, so that another number of ranks can read them. FSDP2's
fp32 weights are the masters: there is no second copy of them.

`ShardWriter` writes that format straight from memory. torch's `HuggingFaceStorageWriter` first builds one bytes object
of everything, which doubles the memory and costs a good part of the time. The files are the same, with torch's header
keys, and `HuggingFaceStorageReader` reads them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from draftworks.errors import StoreError
from draftworks.storage.regular_files import require_file


class ShardWriter(HuggingFaceStorageWriter):
    """Writes one file per rank without syncing: the caller syncs and digests all files of a checkpoint together."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors. Raises StoreError if the file cannot be written."""
        tensors, offsets, results = {}, {}, []
        for item in plan.items:
            assert item.tensor_data is not None  # only tensors are saved
            tensors[item.index.fqn] = _on_cpu(planner.resolve_data(item))
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
            results.append(WriteResult(item.index, item.tensor_data.size.numel(), None))
        if tensors:
            header = {CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
            path = self._folder / _gen_file_name(1, 1, plan.storage_data["shard_index"])
            try:
                save_file(tensors, path, metadata={**header, FORMAT_KEY: FORMAT_VALUE})
            except SafetensorError as error:  # also raised for a full disk
                raise StoreError(f"{path}: cannot be written: {error}") from error
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _on_cpu(tensor: torch.Tensor | object) -> Tensor:
    assert isinstance(tensor, Tensor)  # only tensors are saved this way; counters are JSON
    return tensor.detach().cpu().contiguous()


WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
RNG = "rng"


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a training's state.

    Attributes:
        state: counters, data position, identities; JSON, the same on every rank.
        weights: the whole draft in fp32 on the CPU of rank 0; empty on the others.
        moments: this rank's shards (DTensors) of the optimizer's moments, by name.
        rng: this rank's generators: `cpu`, and `device` if it is another one.
        documents: further JSON files by name, for people and later steps.
    """

    state: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]
    documents: Mapping[str, Any]

    def copy(self) -> Snapshot:
        """Return a snapshot with copied tensors, so that training can continue while it is written."""
        weights, moments, rng = (
            {name: tensor.clone() for name, tensor in tensors.items()}
            for tensors in (self.weights, self.moments, self.rng)
        )
        return Snapshot(self.state, weights, moments, rng, self.documents)


def save_weights_and_rng(folder: Path, snapshot: Snapshot, rank: int) -> None:
    """Write the weights (rank 0) and this rank's generators.

    Raises:
        StoreError, OSError: they cannot be written.
    """
    (folder / RNG).mkdir(exist_ok=True)
    _save_tensors(folder / RNG / f"rank{rank}.safetensors", snapshot.rng)
    if rank == 0:
        _save_tensors(folder / WEIGHTS, snapshot.weights)


def save_moments(folder: Path, moments: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards of the moments. A collective.

    Raises:
        StoreError: on all ranks, what failed on any of them.
    """
    if not moments:
        return
    writer = ShardWriter(folder / OPTIMIZER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code: typed storages, no process group
            dcp.save(dict(moments), storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise StoreError(f"{folder / OPTIMIZER}: {_first_cause(error)}") from error


def load_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Fill the moments from a checkpoint written by any number of ranks. A collective.

    Raises:
        StoreError: on all ranks: a moment is missing, or of another shape.
    """
    if not moments:
        return
    reader = dcp.HuggingFaceStorageReader(str(folder / OPTIMIZER))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code: typed storages, no process group
            dcp.load(dict(moments), storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise StoreError(f"{folder / OPTIMIZER}: {_first_cause(error)}") from error


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the CPU's generator and of the bound device's."""
    states = {"cpu": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {"device": torch.cuda.get_rng_state(device)}


def restore_rng(path: Path, device: torch.device) -> None:
    """Set the generators to what `rng_state` returned."""
    states = load_file(require_file(path))
    torch.set_rng_state(states["cpu"])
    if "device" in states and device.type != "cpu":
        torch.cuda.set_rng_state(states["device"], device)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # also raised for a full disk
        raise StoreError(f"{path}: cannot be written: {error}") from error


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
