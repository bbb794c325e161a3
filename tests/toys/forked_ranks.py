"""Ranks of one small job, forked off a process that has imported everything: see rank_server."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rank_server

from resources.torch_job import ONE_NODE_ENV


class RankServer:
    """The server's process, and the requests that it answers; threads ask in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, rank_server.__file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which end it
        )

    def start(self, program: str, args: Sequence[str], env: Mapping[str, str], log: Path) -> int:
        """Start a rank; returns its pid."""
        return self._ask(program=program, args=list(args), env=dict(env), log=str(log))["pid"]

    def exit_code(self, pid: int) -> int | None:
        """None while it runs."""
        return self._ask(pid=pid)["code"]

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())


@functools.cache
def shared_server() -> RankServer:
    """One for all tests of this process; it ends with it."""
    return RankServer()


@dataclass
class ForkedRanks:
    """The ranks of a job: exit codes by pid, None for those that run."""

    codes: dict[int, int | None]

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
        common, server, codes = {**os.environ, **ONE_NODE_ENV, **(env or {})}, shared_server(), {}
        for rank in range(count):
            own = _environment_of_rank(rank, count, port, folder / "forked" / str(rank))
            own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if nodes else {}
            codes[server.start(program, args, {**common, **own}, log)] = None
        return cls(codes)

    def look(self) -> list[int]:
        """Learn who has ended; returns the pids of those that still run."""
        for pid, code in self.codes.items():
            self.codes[pid] = shared_server().exit_code(pid) if code is None else code
        return [pid for pid, code in self.codes.items() if code is None]

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
