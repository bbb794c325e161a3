"""The launcher that runs torchrun, or the only rank of a job, as a child process of the step."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg
import psutil
from pydantic import Field

from draftworks.distributed import stop_signals
from draftworks.errors import ConfigError
from draftworks.programs.heartbeat import HeartbeatRecord
from resources.process_tree import MARK, ProcessTree
from resources.torch_job import ONE_NODE, ONE_NODE_ENV, ONLY_RANK_ENV, JobState, JobStatus, RunDir, TorchJob
from resources.torch_launcher import TorchLauncher

# torchrun itself kills a stuck worker after this share of the grace, so that torchrun can still exit in order.
_TORCHRUN_SHARE_OF_GRACE = 0.7
_STACKS_S = 1.0
"""Seconds that ranks have to print their stacks before they are ended."""


@dataclass(frozen=True)
class LocalJob:
    """A running torchrun, or only rank, and everything it started; `folder` is where ranks meet, for as long as they run."""

    process: subprocess.Popen[bytes]
    tree: ProcessTree
    folder: tempfile.TemporaryDirectory[str]


class LocalLauncher(TorchLauncher):
    """Runs jobs on this machine. They never outlive the process that launched them, not even when that is killed.

    The kernel signals the death of the *thread* that launched (PR_SET_PDEATHSIG): call `run` from the thread that
    runs the op (Dagster's executors use the main thread), not from a helper thread. On systems other than Linux a
    SIGKILL of the Dagster process leaves torchrun running."""

    grace_s: float = Field(default=10.0, ge=0, description="Seconds a cancelled job has before it is killed.")
    threads: int | None = Field(
        default=None, ge=1, description="OMP_NUM_THREADS of each rank; None shares the usable cores among the ranks."
    )

    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> LocalJob:
        """Start the job in a session of its own, an only rank without torchrun.

        Raises:
            ConfigError: the job has several nodes or copies.
        """
        if job.copies > 1:
            raise ConfigError(f"job {job.module} asks for {job.copies} copies, but the local launcher has no arrays")
        if job.nodes > 1:
            raise ConfigError(
                f"job {job.module} asks for {job.nodes} nodes, but the local launcher has this machine only."
                " Set nodes to 1, or choose another launcher."
            )
        mark = uuid.uuid4().hex
        own = {
            "OMP_NUM_THREADS": str(self.threads or _divide_cores(job.procs_per_node)),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.grace_s * _TORCHRUN_SHARE_OF_GRACE)),
        }
        folder = tempfile.TemporaryDirectory(
            prefix="rendezvous-"
        )  # local: locks of network folders are not to be relied on
        if job.procs_per_node == 1:
            error = run_dir.ranks / "0" / run_dir.error.name
            error.parent.mkdir(parents=True, exist_ok=True)
            command, of_ranks = job.build_rank_command(), {**ONLY_RANK_ENV, "TORCHELASTIC_ERROR_FILE": str(error)}
        else:
            meeting = f"--rdzv-endpoint={folder.name}/store"
            command, of_ranks = job.build_command(*ONE_NODE, meeting, f"--log-dir={run_dir.ranks}"), ONE_NODE_ENV
        with run_dir.log.open("ab") as log:
            process = subprocess.Popen(
                [*stop_signals.build_shim_command(), *command],
                env={**os.environ, **own, **env, **of_ranks, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalJob(process, ProcessTree(process.pid, mark), folder)

    def poll(self, handle: LocalJob) -> JobStatus:
        """Return the state of the job's process. If it has ended, end what it left behind, such as ranks after a kill."""
        code = handle.process.poll()
        if code is None:
            return JobStatus(JobState.RUNNING)
        handle.tree.end(self.grace_s)
        handle.folder.cleanup()
        return JobStatus(JobState.SUCCEEDED if code == 0 else JobState.FAILED, code)

    def cancel(self, handle: LocalJob) -> None:
        """Send SIGTERM to the process tree, wait for the grace, then send SIGKILL."""
        survivors = handle.tree.end(self.grace_s)
        handle.process.poll()
        handle.folder.cleanup()
        if survivors:
            dg.get_dagster_logger().error(f"these processes could not be killed, end them by hand: {survivors}")

    def ask_for_stacks(self, handle: LocalJob, ranks: Sequence[HeartbeatRecord]) -> list[str]:
        """Send SIGUSR1 to each rank: a handler in C prints the stacks of all threads, also of one stuck in native
        code."""
        ours = {process.pid: process for process in handle.tree.scan()}
        states = [_request_stacks(ours.get(rank.pid)) for rank in ranks]
        time.sleep(_STACKS_S)
        return states

    def describe(self, handle: LocalJob) -> dict[str, str | int]:
        return {"engine": "local", "pid": handle.process.pid}


def _divide_cores(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def _request_stacks(rank: psutil.Process | None) -> str:
    """Send SIGUSR1 to a rank and return the state of its process."""
    try:
        if rank is None:
            return "gone"
        state = rank.status()
        rank.send_signal(signal.SIGUSR1)
        return str(state)
    except psutil.Error:
        return "gone"
