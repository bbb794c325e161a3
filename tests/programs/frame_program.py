"""A program in the real frame that does the task in its run file, in place of capture or training."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from draftworks.config.run_files import RunFile
from draftworks.distributed.collectives import open_process_group
from draftworks.distributed.stop_signals import Interrupted, defer_stop
from draftworks.errors import ConfigError
from draftworks.programs.program import ProgramContext, run_program


class FrameRun(RunFile):
    """`task` is what to do; `ranks` is how many ranks must be there."""

    task: str
    ranks: int = 1


def work(run: FrameRun, ctx: ProgramContext) -> dict[str, Any]:
    """Do the task."""
    ctx.log(f"task {run.task}")
    if run.task == "sum":
        return {"sum": _sum_of_ranks(), "ranks": ctx.world_size, "out": str(run.out)}
    if run.task == "crash":
        if ctx.rank == run.ranks - 1:
            raise RuntimeError("a ghost in the machine")
        time.sleep(60)
    if run.task in ("fault", "killed"):
        _die_in_the_midst(run, ctx)
    if run.task == "user_error":
        raise ConfigError("taps: expected at most 8, found 9. Use fewer.")
    if run.task == "meet and wait":
        _sum_of_ranks()
    if run.task in ("wait", "meet and wait"):
        _wait_for_interrupt(run, ctx)
    if run.task == "steps":
        _step_for_ever(ctx)
    if run.task == "stuck":
        with defer_stop():
            (run.out / f"ready-{ctx.rank}").touch()
            time.sleep(60)
    raise AssertionError(f"unknown task {run.task}")


def _sum_of_ranks() -> int:
    with open_process_group("cpu"):
        if not dist.is_initialized():
            return 0
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return int(total)


def _die_in_the_midst(run: FrameRun, ctx: ProgramContext) -> None:
    with open_process_group("cpu"):
        dist.all_reduce(torch.tensor(1))
        if ctx.rank == 0:
            signal.raise_signal(signal.SIGSEGV if run.task == "fault" else signal.SIGKILL)
        dist.all_reduce(torch.tensor(1))


def _step_for_ever(ctx: ProgramContext) -> None:
    with open_process_group("cpu"):
        for step in itertools.count():
            dist.all_reduce(torch.tensor(1))
            ctx.report_progress({"step": step})
            time.sleep(0.05)


def _wait_for_interrupt(run: FrameRun, ctx: ProgramContext) -> None:
    try:
        (run.out / f"ready-{ctx.rank}").touch()
        time.sleep(300)  # long for a busy machine too
    except Interrupted:
        time.sleep(0.5)  # a save takes a while
        (run.out / f"saved-{ctx.rank}").touch()
        raise


if __name__ == "__main__":
    run_program(FrameRun, work)
