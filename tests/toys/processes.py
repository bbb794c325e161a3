"""Whether a process still lives, asked of processes that may end while they are asked."""

from __future__ import annotations

import time

import psutil


def lives(process: psutil.Process) -> bool:
    """True while it runs; one that waits for its parent to collect it has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(process: psutil.Process, within_s: float) -> bool:
    """True if it has ended before the time is up; a slow machine only waits longer."""
    by = time.monotonic() + within_s
    while lives(process) and time.monotonic() < by:
        time.sleep(0.02)
    return not lives(process)
