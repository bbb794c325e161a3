"""Sums and small values over the processes of a run. Without a process group there is one rank, and nothing to do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """This process's number; 0 outside of a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 outside of a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Element-wise sum over all ranks, in float64, on the device of `values`. A collective: every rank calls it."""
    total = values.to(_comm_device(values), torch.float64, copy=True)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.to(values.device)


def gather_from_ranks(value: Any) -> list[Any]:
    """Every rank's small Python value, by rank. A collective: every rank calls it."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _comm_device(values: Tensor) -> torch.device:
    """Where collectives want their tensors: the bound GPU for NCCL, the CPU for gloo."""
    if not dist.is_initialized():
        return values.device
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
