"""The process group, and collectives for sums, small values and errors of all ranks; one rank needs no group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from draftworks.errors import ConfigError, DraftworksError, StoreError

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


def run_on_rank_0(action: Callable[[], Result]) -> Result:
    """Run `action`, which must not communicate, on rank 0; return its small result, or raise its error, on every rank.
    A collective.
    """
    return broadcast_from_rank_0(run_on_every_rank(lambda: action() if get_rank() == 0 else None))


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


_LOOPBACK = "127.0.0.1"
_START_TIMEOUT = timedelta(minutes=30)
"""For all ranks to import their libraries; also the timeout of a collective on GPUs."""
_CPU_TIMEOUT = timedelta(hours=2)
"""Timeout of a collective on CPU: ranks of a capture have unequal work. The launcher notices a stalled rank much earlier."""


def resolve_device(device: str) -> torch.device:
    """Return the device for `auto` (CUDA if available), `cuda` (this rank's GPU) or a device name.

    Raises:
        ConfigError: there is no GPU for this rank.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda":
        return torch.device(device)
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= found:
        raise ConfigError(
            f"device: cuda needs one GPU for each process of a machine, but process {local_rank} finds {found} GPU(s)."
            " Start fewer processes, or use device: cpu."
        )
    return torch.device("cuda", local_rank)


@contextmanager
def open_process_group(device: str) -> Iterator[torch.device]:
    """Yield this rank's device, inside a process group if torchrun started more than one rank.

    The group is destroyed only on success: after a rank has failed, destroying an NCCL group would hang, and the launcher
    ends the other ranks anyway.
    """
    own = resolve_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield own
        return
    backend, at, patience = ("nccl", own, _START_TIMEOUT) if own.type == "cuda" else ("gloo", None, _CPU_TIMEOUT)
    dist.init_process_group(backend, timeout=patience, device_id=at, **_make_store_options())
    yield own
    dist.destroy_process_group()


def find_interface(host: str) -> str | None:
    """Return the name of the network interface by which this machine reaches `host`; None if that is not known.

    gloo would take the interface of this machine's own name, which need not be one that other nodes reach.
    """
    own = find_own_address(host)
    named = ((name, each.address) for name, found in psutil.net_if_addrs().items() for each in found)
    return next((name for name, address in named if address == own), None)


def find_own_address(host: str) -> str | None:
    """Return the address of this machine from which it reaches `host`; None if that is not known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # of a datagram socket: it chooses a route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _make_store_options() -> dict[str, Any]:
    """Return arguments of `init_process_group` for a store on loopback; empty if ranks run on several machines.

    torchrun's store, and any store created by address and port, listens on all addresses. With
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun leaves the creation of the store to its workers.
    """
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        name = find_interface(os.environ.get("MASTER_ADDR", ""))
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        return {}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback is not None:
            os.environ.setdefault(variable, loopback)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        return {}
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listening = socket.create_server((_LOOPBACK, port)).detach() if rank == 0 else None
    store = dist.TCPStore(
        _LOOPBACK, port, world_size, is_master=rank == 0, timeout=_START_TIMEOUT, master_listen_fd=listening
    )
    return {"store": store, "rank": rank, "world_size": world_size}


class Verdict(IntEnum):
    """What a rank wants; of several, the greatest is done."""

    GO = 0
    WAIT = 1
    END = 2
    STOP = 3
    FAIL = 4


@dataclass(frozen=True)
class Decision:
    """A verdict, and the signal that asks for a stop."""

    verdict: Verdict
    signum: int = 0


_SIGNALS = 256


def agree(own: Decision, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> Decision:
    """Return the greatest decision of all ranks; two collectives at most, the second one only for a failure.

    Args:
        error: why this rank fails, with `Verdict.FAIL`.

    Raises:
        Exception: on the ranks that failed, their own error.
        StoreError: on the other ranks, the first error of one that failed, with its rank.
    """
    found = max_over_ranks(own.verdict * _SIGNALS + own.signum, group)
    decision = Decision(Verdict(found // _SIGNALS), found % _SIGNALS)
    if decision.verdict is Verdict.FAIL:
        reasons = gather_from_ranks(None if error is None else describe_error(error), group)
        if error is not None:
            raise error
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text is not None)
        raise StoreError(f"rank {rank}: {reason}")
    return decision
