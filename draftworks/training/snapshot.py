"""The state of a training between two optimizer steps, and how its tensors are stored.

Weights are stored whole in plain safetensors, since other programs read them. The optimizer's moments are stored
sharded in torch.distributed.checkpoint's safetensors format, so that another number of ranks can read them: by a process
alone with `moment_files`, in a process group with `sharded_moments`. FSDP2's fp32 weights are the masters: there is no
second copy of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.storage.files import require_file
from draftworks.training.moment_files import load_whole_moments, save_whole_moments

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
    from draftworks.training.sharded_moments import save_sharded_moments

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
    from draftworks.training.sharded_moments import load_sharded_moments

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
