"""Runs one job of the toy scheduler, as a node's daemon would: ranks in a session of their own. Standard library only.

    python toy_node.py FOLDER

The folder has `job.json`; a file `end` or `preempt` in it asks for an end; `state.json` says what became of the job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.02


def write_json(path: Path, value: Any) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(json.dumps(value))
    os.replace(staging, path)


def start_ranks(job: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Start the ranks with the environment that torchrun gives them, without its long start."""
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(job["procs"]):
        own = Path(job["ranks"]) / str(rank)
        own.mkdir(parents=True)
        env = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job["procs"],
            "LOCAL_WORLD_SIZE": job["procs"],
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCHELASTIC_ERROR_FILE": own / "error.json",
        }
        with open(job["log"], "ab") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", job["module"], *job["args"]],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **job["env"], **{key: str(env[key]) for key in env}},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return ranks


def end_ranks(ranks: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Terminate twice, as Slurm does; kill after the grace."""
    for _ in range(2):
        for rank in ranks:
            rank.terminate()
    deadline = time.monotonic() + grace_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for rank in ranks:
        rank.kill()
        rank.wait()


def watch(folder: Path, job: dict[str, Any], ranks: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Return the job's final state."""
    started = time.monotonic()
    while True:
        codes = [rank.poll() for rank in ranks]
        if (folder / "end").exists():
            end_ranks(ranks, float((folder / "end").read_text()))
            return {"state": "cancelled", "reason": "Cancelled"}
        if (folder / "preempt").exists():
            end_ranks(ranks, 5.0)
            return {"state": "failed", "reason": "Preempted", "lost": True}
        if job["time_limit_s"] and time.monotonic() - started > job["time_limit_s"]:
            end_ranks(ranks, 5.0)
            return {"state": "failed", "reason": "TimeLimit", "lost": True}
        if any(codes):
            end_ranks(ranks, 5.0)
            return {"state": "failed", "reason": "NonZeroExitCode"}
        if all(code == 0 for code in codes):
            return {"state": "succeeded"}
        time.sleep(POLL_S)


def main(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = json.loads((folder / "job.json").read_text())
    while (folder.parent / "full").exists():
        if (folder / "end").exists():
            return write_json(folder / "state.json", {"state": "cancelled", "reason": "Cancelled"})
        time.sleep(POLL_S)
    write_json(folder / "state.json", {"state": "running"})
    write_json(folder / "state.json", watch(folder, job, start_ranks(job)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
