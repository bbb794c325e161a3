"""A function on several ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LATER = ("torch._dynamo", "torch.distributed.fsdp")
"""What the first optimizer step and the backend import."""


def on_ranks(world: int, folder: Path, work: Callable[..., None], *args: Any) -> None:
    """Run `work(rank, *args)` on `world` processes of one gloo group; an error in one fails the caller.

    They are forked off a server that has torch: to import it would take longer than most of their work.
    """
    multiprocessing.set_forkserver_preload(["draftworks.training.trainer", *LATER])
    group = (world, str(folder / "rendezvous"), work, args)
    mp.start_processes(_joined, group, nprocs=world, start_method="forkserver")


def _joined(rank: int, world: int, rendezvous: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    work(rank, *args)
    dist.destroy_process_group()
