"""A rank that imports no torch, so that it starts fast, and does what its first argument says.

The second argument is a path that no other process has in its arguments: by it the tests find survivors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dagster_pipes import open_dagster_pipes

from draftworks.distributed.stop_signals import Interrupted, die_with_parent, end_with_parent, raise_on_stop


def main(task: str, marker: str, *rest: str) -> None:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} speaks", flush=True)
    if task in ("leave", "fall"):
        _hide_a_child(marker)
    if task == "fall":
        raise SystemExit(3)
    if task in ("report", "leave") and rank == 0:
        with open_dagster_pipes() as pipes:
            for number in range(int(rest[0])):
                pipes.report_custom_message({"report": {"number": number, "threads": os.environ["OMP_NUM_THREADS"]}})
    elif task == "flood" and rank == 0:
        print("x" * 79 + "\n", end="", flush=True)
        sys.stdout.write(("y" * 79 + "\n") * 30_000 + "the last words\n")
    elif task == "die":
        print(f"attempt in {os.environ['TORCHELASTIC_ERROR_FILE'].split('/ranks/')[0]}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif task == "hang":
        die_with_parent()
        _hang(marker, rank)
    elif task == "save":
        end_with_parent(60)
        raise_on_stop()
        try:
            _hang(marker, rank)
        except Interrupted:
            time.sleep(1)
            Path(f"{marker}.saved.{rank}").touch()
            raise
    elif task == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _hide_a_child(marker)
        _hang(marker, rank)


def _hang(marker: str, rank: int) -> None:
    Path(f"{marker}.{rank}").touch()
    time.sleep(120)


def _hide_a_child(marker: str) -> None:
    """Start a process that is not found by walking down the process tree: in its own session, with a dead parent."""
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    sleep = [sys.executable, "-c", "import time; time.sleep(120)", marker]
    subprocess.run([sys.executable, "-c", code, *sleep], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
