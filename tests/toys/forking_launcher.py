"""A launcher whose ranks are forked off a process that has imported everything: see rank_server."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import rank_server

from draftworks.config.registry_files import LauncherSpec
from resources.launchers import launcher_for
from resources.local_launcher import LocalJob, LocalLauncher
from resources.torch_job import ONE_NODE_ENV, JobState, JobStatus, RunDir, TorchJob

_FAILED = 1
"""torchrun's own exit code when a rank fails."""


class RankServer:
    """The server's process, and the requests that it answers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, rank_server.__file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which end it
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def start(self, module: str, args: tuple[str, ...], env: Mapping[str, str], log: Path) -> int:
        """Start a rank; returns its pid."""
        return self._ask(module=module, args=args, env=dict(env), log=str(log))["pid"]

    def exit_code(self, pid: int) -> int | None:
        """None while it runs."""
        return self._ask(pid=pid)["code"]

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@functools.cache
def shared_server() -> RankServer:
    """One for all tests of this process; it ends with it."""
    return RankServer()


@dataclass
class ForkedJob:
    """The ranks of a running job: exit codes by pid, None for those that run."""

    codes: dict[int, int | None]


class ForkingLauncher(LocalLauncher):
    """Gives each rank the environment that torchrun gives it, without torchrun and without the imports.

    A job with an interpreter of its own is the real launcher's. No test of signals, kills or stalls uses this one.
    """

    poll_interval_s: float = 0.02

    def submit(self, job: TorchJob, env: Mapping[str, str], run_dir: RunDir) -> LocalJob | ForkedJob:
        if job.python is not None:
            return super().submit(job, env, run_dir)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server, codes = shared_server(), {}
        for rank in range(job.procs_per_node):
            own = _environment_of_rank(rank, job.procs_per_node, port, run_dir)
            pid = server.start(job.module, job.args, {**os.environ, **ONE_NODE_ENV, **env, **own}, run_dir.log)
            codes[pid] = None
        return ForkedJob(codes)

    def poll(self, handle: LocalJob | ForkedJob) -> JobStatus:
        """As torchrun: the first rank that fails ends the others."""
        if isinstance(handle, LocalJob):
            return super().poll(handle)
        self._look_at_ranks(handle)
        if any(handle.codes.values()):
            self.cancel(handle)
            return JobStatus(JobState.FAILED, _FAILED)
        if None in handle.codes.values():
            return JobStatus(JobState.RUNNING)
        return JobStatus(JobState.SUCCEEDED, 0)

    def cancel(self, handle: LocalJob | ForkedJob) -> None:
        if isinstance(handle, LocalJob):
            return super().cancel(handle)
        for end in (psutil.Process.terminate, psutil.Process.kill):
            deadline = time.monotonic() + self.grace_s
            for pid in self._look_at_ranks(handle):
                end(psutil.Process(pid))
            while self._look_at_ranks(handle) and time.monotonic() < deadline:
                time.sleep(self.poll_interval_s)

    def describe(self, handle: LocalJob | ForkedJob) -> dict[str, str | int]:
        if isinstance(handle, LocalJob):
            return super().describe(handle)
        return {"engine": "local", "pid": next(iter(handle.codes))}

    def _look_at_ranks(self, job: ForkedJob) -> list[int]:
        """The pids of those that still run."""
        for pid, code in job.codes.items():
            job.codes[pid] = shared_server().exit_code(pid) if code is None else code
        return [pid for pid, code in job.codes.items() if code is None]


def forking_launcher_for(spec: LauncherSpec) -> ForkingLauncher:
    """The launcher of a deployment, in place of `resources.launchers.launcher_for`."""
    return ForkingLauncher(**launcher_for(spec).model_dump(exclude={"poll_interval_s"}))


def _environment_of_rank(rank: int, ranks: int, port: int, run_dir: RunDir) -> dict[str, str]:
    folder = run_dir.ranks / "forked" / str(rank)
    folder.mkdir(parents=True)
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    of_job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1}
    return {
        **{name: str(value) for name, value in {**of_rank, **of_job}.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
