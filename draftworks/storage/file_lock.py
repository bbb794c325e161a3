"""A file lock that logs while a process waits for it."""

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
    """Hold the lock file `lock` in the block; yields whether another process held it before.

    The system releases the lock when its process ends, in whatever way.

    Args:
        busy: log message while another process holds the lock, repeated every `reminder_s` seconds.
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


@contextmanager
def try_lock(lock: Path) -> Iterator[bool]:
    """Hold the lock file `lock` in the block if no other process holds it; yields whether it is held."""
    mine = FileLock(lock)
    try:
        mine.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        mine.release()
