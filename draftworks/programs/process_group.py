"""The process group of a program: gloo on CPU, NCCL on CUDA, none for a single rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from draftworks.errors import ConfigError


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
def distributed(device: str) -> Iterator[torch.device]:
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
    if own.type == "cuda":
        dist.init_process_group("nccl", device_id=own)
    else:
        dist.init_process_group("gloo")
    yield own
    dist.destroy_process_group()
