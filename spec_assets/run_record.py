"""A run whose record says that it is over has no process any more.

A UI reaches a run through the code server that launched it. Where that server is gone, it can only mark the run as
cancelled ("force termination"), and the daemon can only give it up; neither reaches the process. So the process looks.
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
    """As Ctrl-C does: Dagster ends the run's steps, and they end their jobs."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def ended_with_record(
    instance: dg.DagsterInstance,
    run_id: str,
    end: Callable[[], None] = interrupt_this_process,
    every_s: float = LOOK_EVERY_S,
) -> Iterator[None]:
    """Call `end` once if the record of a run is finished or deleted while the body is still at work."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            try:
                run = instance.get_run_by_id(run_id)
            except Exception:  # a storage that cannot be reached now says nothing about the run
                continue
            if (run is None or run.is_finished) and not over.is_set():
                end()
                return

    threading.Thread(target=look, name="run-record", daemon=True).start()
    try:
        yield
    finally:
        over.set()
