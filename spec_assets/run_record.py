"""Ends the process of a run whose record in Dagster says that the run is over.

A UI reaches a run through the code server that launched it. Where that server is gone, it can only mark the run as
cancelled ("force termination"), and the daemon can only mark it as failed. Neither reaches the process, so the process
checks its own record.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dagster as dg

LOOK_EVERY_S = 5.0


def interrupt_this_process() -> None:
    """Send SIGINT to this process: Dagster then ends the run's steps, and each step ends its job."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def end_with_record(
    instance: dg.DagsterInstance,
    run_id: str,
    end: Callable[[], None] = interrupt_this_process,
    every_s: float = LOOK_EVERY_S,
) -> Iterator[None]:
    """Call `end` once if the run's record is finished or deleted while the body of the `with` still runs."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            try:
                run = instance.get_run_by_id(run_id)
            except Exception:  # the storage may be unreachable for a while
                continue
            if (run is None or run.is_finished) and not over.is_set():
                end()
                return

    threading.Thread(target=look, name="run-record", daemon=True).start()
    try:
        yield
    finally:
        over.set()
