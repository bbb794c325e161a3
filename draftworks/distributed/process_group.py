"""The process group of a program: gloo on CPU, NCCL on CUDA, none for a single rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from draftworks.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT = timedelta(minutes=30)
"""Until all ranks have loaded their libraries; and how long one waits for another in a collective on GPUs."""
_CPU_TIMEOUT = timedelta(hours=2)
"""As the latter on a CPU: shares of a capture differ. A rank that stands still is noticed by the launcher long before."""


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one; `cuda` is this rank's own GPU. Raises ConfigError for a GPU that is not there."""
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
    """This rank's device, inside a process group when torchrun started more than one rank.

    The group is left in an orderly way only after success: with a rank gone, NCCL's farewell would hang, and the
    launcher ends the others anyway.
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


def _make_store_options() -> dict[str, Any]:
    """Where the ranks of one machine meet: on loopback. Several machines: as torchrun says, on an interface of theirs.

    torchrun's store, and any that is made by address and port, listens on all addresses. Started with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun leaves the store to us.
    """
    if os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
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
