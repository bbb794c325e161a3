"""Processes that tests start: whether they still live, asked while they may end, and their end whatever a test comes to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import AnyStr

import psutil
from waiting import wait_until


def lives(process: psutil.Process) -> bool:
    """True while it runs; one that waits for its parent to collect it has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(*processes: psutil.Process) -> None:
    """Wait until none of them lives."""
    wait_until(
        lambda: not any(map(lives, processes)), lambda: f"the end of {[each for each in processes if lives(each)]}"
    )


@contextmanager
def ending(process: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """Kill the process and all below it at the end of the block; also the orphans of its session, if it has its own."""
    try:
        yield process
    finally:
        end_tree(process)


def end_tree(process: subprocess.Popen[AnyStr]) -> None:
    """Kill the process, all below it and all of its session, if it has its own; close its pipes."""
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        kill_all(left)
    while orphans := [each for each in psutil.process_iter() if lives(each) and _is_of_session(each, process.pid)]:
        kill_all(orphans)
    with process:  # it waits for it
        pass


def kill_all(processes: list[psutil.Process]) -> None:
    """Kill processes, and return when none lives."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    wait_until_ended(*processes)


def _is_of_session(process: psutil.Process, leader: int) -> bool:
    with suppress(ProcessLookupError):
        return process.pid != leader and os.getsid(process.pid) == leader
    return False
