"""Ranks of one small job, without torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.torch_job import ONE_NODE_ENV


@dataclass
class ForkedRanks:
    """The ranks of a job, in order."""

    processes: list[subprocess.Popen[bytes]]

    @classmethod
    def start(
        cls,
        program: str,
        args: Sequence[str],
        count: int,
        folder: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        nodes: bool = False,
    ) -> ForkedRanks:
        """Start `count` ranks of a module, or of a script, with the environment that torchrun gives them.

        `folder` holds their error files, `log` the output of all, `env` is added to the environment of this process. With
        `nodes` each rank is told that it is alone on its node.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {**os.environ, **ONE_NODE_ENV, **(env or {})}
        command = [sys.executable, "-u", *([program] if program.endswith(".py") else ["-m", program]), *map(str, args)]
        ranks = cls([])
        for rank in range(count):
            own = _environment_of_rank(rank, count, port, folder / "forked" / str(rank))
            own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if nodes else {}
            with log.open("ab") as output:
                started = subprocess.Popen(
                    command,
                    env={**common, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            ranks.processes.append(started)
        return ranks

    @property
    def codes(self) -> dict[int, int | None]:
        """Exit codes by pid, None for those that run when last looked at."""
        return {process.pid: process.returncode for process in self.processes}

    def look(self) -> list[int]:
        """Learn who has ended; returns the pids of those that still run."""
        return [process.pid for process in self.processes if process.poll() is None]

    def wait(self, seconds: float = 120.0) -> list[int | None]:
        """The exit codes of all ranks, by rank; None for those that still run when the time is up."""
        deadline = time.monotonic() + seconds
        while self.look() and time.monotonic() < deadline:
            time.sleep(0.02)
        return list(self.codes.values())


def _environment_of_rank(rank: int, count: int, port: int, folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True)
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    of_job = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "ROLE_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1}
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
