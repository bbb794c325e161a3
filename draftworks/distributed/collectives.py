"""Collectives for sums, small values and errors of all ranks; without a process group they act on the one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftworks.errors import DraftworksError, StoreError

Result = TypeVar("Result")


def get_rank() -> int:
    """Return the rank of this process; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_local_world_size() -> int:
    """Return the number of ranks on this node, as torchrun says it; that of all ranks if nobody says it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise sum over all ranks, in float64, on the device of `values`. A collective."""
    total = values.to(_choose_comm_device(values), torch.float64, copy=True)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.to(values.device)


def max_over_ranks(value: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the largest value of all ranks. A collective."""
    if get_world_size() == 1:
        return value
    found = torch.tensor([value], dtype=torch.int64)
    found = found.to(_choose_comm_device(found, group))
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return int(found)


def gather_from_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the small Python values of all ranks, in rank order. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def broadcast_from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's small Python value on every rank. A collective."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def run_on_every_rank(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run `action`, which must not communicate, on every rank; an error on one rank is raised on all. A collective.

    Otherwise the ranks that succeeded would wait for the failed one until a collective times out.

    Raises:
        StoreError: the first error of another rank, with its rank; this rank's own DraftworksError is raised as it is.
    """
    result, error = None, None
    try:
        result = action()
    except (OSError, ValueError, DraftworksError) as caught:
        error = caught
    said = None if error is None else describe_error(error)
    errors = {number: text for number, text in enumerate(gather_from_ranks(said, group)) if text is not None}
    if isinstance(error, DraftworksError):
        raise error
    if errors:
        first, text = next(iter(errors.items()))
        raise StoreError(f"rank {first}: {text}" if get_world_size() > 1 else text) from error
    return result  # type: ignore[return-value]


def describe_error(error: Exception) -> str:
    """Return an error as other ranks name it: a user's error by its message alone."""
    return str(error) if isinstance(error, DraftworksError) else f"{type(error).__name__}: {error}"


def _choose_comm_device(values: Tensor, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device that collectives use: the current GPU for NCCL, the CPU for gloo."""
    if not dist.is_initialized():
        return values.device
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
