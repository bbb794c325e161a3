"""A rank for the contract of launchers: imports no torch, and does what its first argument says.

    python -m contract_worker TASK FOLDER

`FOLDER` is shared with the test: a rank that is up leaves `up.RANK` there, and ends when `finish` is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from dagster_pipes import PipesContext, open_dagster_pipes

from draftworks.distributed.stop_signals import Interrupted, end_with_parent, raise_on_stop
from draftworks.programs.failure import leave_error_file
from draftworks.programs.heartbeat import Heartbeat

FAILURE = "rank 1 has had enough"
STEP_S = 0.05


def main(task: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    end_with_parent(60)
    raise_on_stop()
    heartbeat = Heartbeat.beside_error_file()
    print(f"rank {rank} speaks", flush=True)
    with ExitStack() as open_pipes:
        pipes = open_pipes.enter_context(open_dagster_pipes()) if rank == 0 else None
        try:
            if task == "fail" and rank == 1:
                raise RuntimeError(FAILURE)
            if task == "die":
                die_in_the_first_torchrun(folder / "died")
            if task == "stuck":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                (folder / f"up.{rank}").touch()
                time.sleep(300)
            steps = take_steps(folder, rank, pipes, saves=task != "forget") if task in ("steps", "forget") else 0
        except BaseException as error:
            leave_error_file(error)
            raise
        if pipes is not None:
            pipes.report_custom_message({"report": {"task": task, "steps": steps}})
    if heartbeat is not None:
        heartbeat.close()


def die_in_the_first_torchrun(died: Path) -> None:
    """Kill every rank of the first torchrun, the slower ones too; return in those of another."""
    torchrun = str(os.getppid())
    if not died.exists() or died.read_text() in ("", torchrun):
        died.write_text(torchrun)
        os.kill(os.getpid(), signal.SIGKILL)


def take_steps(folder: Path, rank: int, pipes: PipesContext | None, saves: bool) -> int:
    """Count steps until the test says so; after an interruption go on from the checkpoint of rank 0."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    step = max((int(path.name) for path in checkpoints.iterdir()), default=0)
    try:
        if pipes is not None:
            pipes.log.info(f"begins at step {step}")
        while not (folder / "finish").exists():
            step += 1
            if pipes is not None:
                pipes.log.info(f"step {step} is done")
            (folder / f"up.{rank}").touch()
            time.sleep(STEP_S)
    except Interrupted:
        if saves and rank == 0:
            (checkpoints / str(step)).touch()
        raise
    return step


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except Interrupted as interrupt:
        sys.exit(128 + interrupt.signum)
