"""The state of a training between two optimizer steps, and how its tensors are stored.

Weights are stored whole in plain safetensors, since other programs read them. The optimizer's moments are stored
sharded in torch.distributed.checkpoint's safetensors format, so that another number of ranks can read them: by a process
alone with `moment_files`, in a process group with `sharded_moments`. FSDP2's fp32 weights are the masters: there is no
second copy of them.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

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


WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
RNG = "rng"


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a training's state.

    Attributes:
        state: counters, data position, identities; JSON, the same on every rank.
        weights: the whole draft in fp32 on the CPU of rank 0; empty on the others.
        moments: this rank's shards (DTensors in a process group) of the optimizer's moments, by name.
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
    if not dist.is_initialized():
        save_whole_moments(folder / OPTIMIZER, moments)
        return

    save_sharded_moments(folder / OPTIMIZER, moments, group)


def load_moments(folder: Path, moments: Mapping[str, Tensor]) -> None:
    """Fill the moments from a checkpoint written by any number of ranks. A collective.

    Raises:
        StoreError: on all ranks: a moment is missing, or of another shape.
    """
    if not moments:
        return
    if not dist.is_initialized():
        load_whole_moments(folder / OPTIMIZER, moments)
        return

    load_sharded_moments(folder / OPTIMIZER, moments)


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
