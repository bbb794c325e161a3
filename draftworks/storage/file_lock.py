"""File locks that processes wait for, and say so while they wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

REMINDER_S = 60.0

log = logging.getLogger(__name__)


@contextmanager
def hold_lock(lock: Path, busy: str, reminder_s: float = REMINDER_S) -> Iterator[bool]:
    """Hold the lock in the file `lock`; whether another process had it first. It goes with its process, however that ends.

    Args:
        busy: said when another process has it, and again every `reminder_s` seconds.
    """
    mine, started, waited = FileLock(lock), time.monotonic(), False
    try:
        mine.acquire(timeout=0)
    except Timeout:
        waited = True
        log.info(busy)
        while not mine.is_locked:
            try:
                mine.acquire(timeout=reminder_s)
            except Timeout:
                log.info("%s (%.0f s so far)", busy, time.monotonic() - started)
    try:
        yield waited
    finally:
        mine.release()
