"""A torchrun job, its state, and its files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from draftworks.errors import ConfigError

ONE_NODE = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1")
ONE_NODE_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun opens a TCP store for the ranks on all addresses; with it the ranks open one on loopback."""


@dataclass(frozen=True)
class TorchJob:
    """A Python module to run under torchrun, independent of the launcher. Raises ConfigError for impossible counts.

    Attributes:
        python: the interpreter of every rank; None for that of the launching process.
        longest_wait_s: longest time in seconds for which the job may only wait, such as for a server, without a stall.
    """

    module: str
    args: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 0
    procs_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    longest_wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.procs_per_node < 1 or self.gpus_per_node < 0:
            raise ConfigError(
                f"job {self.module}: nodes and procs_per_node must be at least 1 and gpus_per_node at least 0, found"
                f" nodes={self.nodes}, procs_per_node={self.procs_per_node}, gpus_per_node={self.gpus_per_node}"
            )

    def build_command(self, *options: str) -> list[str]:
        """Return the torchrun command line with `options`.

        Without a rendezvous option, the ranks of one node meet in a temporary file: torchrun's own store listens on all
        addresses and unpickles what it receives. It requires `ONE_NODE_ENV` in the environment.
        """
        rendezvous = () if any(option.startswith("--rdzv") for option in options) else ONE_NODE
        torchrun = (str(self.python or sys.executable), "-m", "torch.distributed.run", *rendezvous, *options)
        return [*torchrun, f"--nproc-per-node={self.procs_per_node}", "-m", self.module, *self.args]


class JobState(Enum):
    """State of a job. `PENDING` is for launchers that queue; a time limit counts from `RUNNING`."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (JobState.PENDING, JobState.RUNNING)


class JobStatus(NamedTuple):
    """State and exit code of a job; the code is None while it runs, and if the launcher does not know it."""

    state: JobState
    exit_code: int | None = None


@dataclass(frozen=True)
class RunDir:
    """The folder of one attempt. Attempts share no files, so an old error file is never taken for a new one."""

    path: Path

    @classmethod
    def create(cls, base: Path, run_id: str, retry: int) -> RunDir:
        """Create a new folder `RUN-retryN` in `base`; a second job of the same attempt gets a number after it."""
        name, number = f"{run_id[:8]}-retry{retry}", 1
        while True:
            path = base.resolve() / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                number += 1

    @property
    def log(self) -> Path:
        """stdout and stderr of all ranks."""
        return self.path / "out.log"

    @property
    def messages(self) -> Path:
        """Dagster Pipes messages of rank 0."""
        return self.path / "messages.jsonl"

    @property
    def error(self) -> Path:
        """torchrun's own error file."""
        return self.path / "error.json"

    @property
    def ranks(self) -> Path:
        """torchrun's log folder, with an error file for each rank in subfolders."""
        return self.path / "ranks"
