"""Locks in a file system that several hosts may share, as leases; a process that waits for one logs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftworks.storage.lease import DEFAULT_TIMES, Lease, LeasePath, LeaseTimes

REMINDER_S = 60.0
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.25

log = logging.getLogger(__name__)


@contextmanager
def hold_lock(
    lock: Path, busy: str, reminder_s: float = REMINDER_S, times: LeaseTimes = DEFAULT_TIMES
) -> Iterator[Lease]:
    """Hold `lock` in the block; yields the lease, which knows whether another process held it before.

    A process of this machine that ends, in whatever way, holds it no longer. One of another machine does so until it was
    not heard of for `times.lease_s`.

    Args:
        lock: a folder that is made for the lease; its parent exists.
        busy: log message while another process holds the lock, repeated every `reminder_s` seconds.
    """
    lease = wait_for_lock(LeasePath(lock, times), busy, reminder_s)
    try:
        yield lease
    finally:
        lease.release()


@contextmanager
def try_lock(lock: Path) -> Iterator[Lease | None]:
    """Hold `lock` in the block if no other process holds it; yields the lease, None if it is not held."""
    lease = LeasePath(lock).try_acquire()
    try:
        yield lease
    finally:
        if lease is not None:
            lease.release()


def wait_for_lock(path: LeasePath, busy: str, reminder_s: float = REMINDER_S) -> Lease:
    """Take the lease, and wait for it where another process holds it. See `hold_lock`."""
    lease = path.try_acquire()
    if lease is not None:
        return lease
    started = time.monotonic()
    remind_at, pause_s = started + reminder_s, _FIRST_POLL_S
    log.info(busy)
    while lease is None:
        time.sleep(min(pause_s, max(remind_at - time.monotonic(), 0)))
        pause_s = min(pause_s * 1.5, _LAST_POLL_S)
        if time.monotonic() >= remind_at:
            log.info("%s (%.0f s so far)", busy, time.monotonic() - started)
            remind_at += reminder_s
        lease = path.try_acquire()
    lease.waited = True
    return lease
