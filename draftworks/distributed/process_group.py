"""Device and process group of a program: gloo on CPU, NCCL on CUDA, no group for a single rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from draftworks.errors import ConfigError

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
