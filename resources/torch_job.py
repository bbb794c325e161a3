"""A torchrun job, its state, and its files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from draftworks.config.launchers import LauncherSpec
from draftworks.errors import ConfigError

ONE_NODE = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1")
ONE_NODE_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun opens a TCP store for the ranks on all addresses; with it the ranks open one on loopback."""
ONLY_RANK_ENV = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "none",  # by which a program knows that it is to end with its parent
}
"""What torchrun would tell a job's only rank, by torchrun's names."""


@dataclass(frozen=True)
class JobIdentity:
    """Identity of a job over submissions, for launchers whose jobs survive the process that submitted them.

    Attributes:
        name: the job's name in the scheduler, a digest of what it makes and from what.
        claim: the file that says who waits for the job; see `resources.job_claims`.
        made: partition/asset, and /program for a job that runs beside another.
        progress: folders in which an interrupted job has left other files than before, if it has made progress.
    """

    name: str
    claim: Path
    made: str = ""
    progress: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TorchJob:
    """A Python module to run under torchrun, independent of the launcher. Raises ConfigError for impossible counts.

    Attributes:
        python: the interpreter of every rank; None for that of the launching process.
        longest_wait_s: longest time in seconds for which the job may only wait, such as for a server, without a stall.
        launcher: settings of the launcher that is to run it; None: it runs where Dagster runs.
        identity: by which a scheduler's job is found again; None for a job that nobody has to find.
        copies: like jobs to start at once, as an array of the scheduler. Each has a number from 0, in `COPY_VARIABLE` of its
            environment.
    """

    module: str
    args: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 0
    procs_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    longest_wait_s: float = 0.0
    launcher: LauncherSpec | None = None
    identity: JobIdentity | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if min(self.nodes, self.procs_per_node, self.copies) < 1 or self.gpus_per_node < 0:
            raise ConfigError(
                f"job {self.module}: nodes, procs_per_node and copies must be at least 1, gpus_per_node at least 0, found"
                f" nodes={self.nodes}, procs_per_node={self.procs_per_node}, gpus_per_node={self.gpus_per_node},"
                f" copies={self.copies}"
            )

    def build_command(self, *options: str) -> list[str]:
        """Return the torchrun command line with `options`.

        Without a rendezvous option, the ranks of one node meet in a temporary file: torchrun's own store listens on all
        addresses and unpickles what it receives. It requires `ONE_NODE_ENV` in the environment.
        """
        rendezvous = () if any(option.startswith("--rdzv") for option in options) else ONE_NODE
        torchrun = (str(self.python or sys.executable), "-m", "torch.distributed.run", *rendezvous, *options)
        return [*torchrun, f"--nproc-per-node={self.procs_per_node}", "-m", self.module, *self.args]

    def build_rank_command(self) -> list[str]:
        """Return the command line of a job's only rank, which has nobody to meet: it saves torchrun's own import of torch."""
        return [str(self.python or sys.executable), "-u", "-m", self.module, *self.args]


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
    """State and exit code of a job; the code is None while it runs, and if the launcher does not know it.

    `reason` is what the scheduler says of it, empty where there is none.
    """

    state: JobState
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class RunDir:
    """The folder of one attempt. Attempts share no files, so an old error file is never taken for a new one.

    A scheduler's job that was submitted again goes on with log and messages of the first submission.

    Attributes:
        submission: number of this submission of the job; error files and ranks are its own.
        copy: number of one of the job's copies, whose log and ranks are its own; None: the job as a whole.
    """

    path: Path
    submission: int = 1
    copy: int | None = None

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
        return self.path / ("out.log" if self.copy is None else f"out-copy{self.copy}.log")

    @property
    def messages(self) -> Path:
        """Dagster Pipes messages of rank 0."""
        return self.path / "messages.jsonl"

    @property
    def error(self) -> Path:
        """torchrun's own error file."""
        return self._own / ("error.json" if self.copy is None else f"error-copy{self.copy}.json")

    @property
    def ranks(self) -> Path:
        """torchrun's log folder, with an error file for each rank in subfolders; those of copies are subfolders too."""
        ranks = self._own / "ranks"
        return ranks if self.copy is None else ranks / f"copy{self.copy}"

    @property
    def _own(self) -> Path:
        return self.path if self.submission == 1 else self.path / f"submission{self.submission}"

    def of_copy(self, copy: int) -> RunDir:
        """Return the files of one of the job's copies."""
        return replace(self, copy=copy)

    def next_submission(self) -> RunDir:
        """Return the files of the next submission of the same job, whose folder is made."""
        following = RunDir(self.path, self.submission + 1)
        following._own.mkdir(parents=True, exist_ok=True)
        return following
