"""A limit on the CPU time of work that may not terminate, such as rendering a user's template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class CpuTimeExceeded(BaseException):
    """The work used more CPU time than allowed. A BaseException, so that `except Exception` in the work does not catch it."""


@contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise `CpuTimeExceeded` in the block after `seconds` of CPU time of this process.

    CPU time rather than wall time, so that a busy machine makes no difference. Interrupts Python code in the main thread
    only; in other threads, and on systems without this timer, there is no limit. Must not be nested.
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
