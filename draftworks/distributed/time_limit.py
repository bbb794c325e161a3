"""A bound for work whose end nobody can foresee."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class CpuTimeExceeded(BaseException):
    """The work took longer than it may. No Exception, so that the work itself does not catch it."""


@contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise `CpuTimeExceeded` in what runs inside after so many seconds of computing by this process.

    Time of a processor, not of a clock, so that a busy machine changes nothing. Python's own work only, in the main
    thread only: elsewhere, and where a system has no such timer, nothing is bounded. Not to be nested.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    raise CpuTimeExceeded
