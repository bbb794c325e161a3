"""Requests to stop: SIGTERM and SIGINT, of which only the first counts for some seconds.

Slurm sends SIGTERM to every process of a job, and torchrun passes its own on, so that a rank gets two within a
millisecond; a terminal does the same with Ctrl-C. A handler that restored the default action after the first would
die of the second with nothing saved. Standard library only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

REPEATS_S = 5.0
"""Seconds after the first request in which further ones count as the same one."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REPEAT_NOTICE = b"already stopping; a signal more than %d s after the first one ends it at once\n" % REPEATS_S


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT arrived. Save what is worth saving within the launcher's grace and let it pass on.

    The exit code is 128 plus the signal's number, and torchelastic's error file says so too.
    """

    def __init__(self, signum: int, more: str = "") -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}{more}")
        self.signum = signum


class StopRequest:
    """A handler of SIGTERM and SIGINT that tells the first request from its repeats.

    Args:
        first: called with the signal's number when the first request comes; may raise.
        insisted: called when another one comes more than `REPEATS_S` later.

    Attributes:
        signum: the signal that asked this process to stop, or 0.
    """

    def __init__(self, first: Callable[[int], Any], insisted: Callable[[int], Any]) -> None:
        self.signum = 0
        self._first = first
        self._insisted = insisted
        self._since = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
            self._first(signum)
        elif time.monotonic() - self._since > REPEATS_S:
            self._insisted(signum)
        else:
            with suppress(OSError):
                os.write(2, _REPEAT_NOTICE)  # print is not to be called where a print may be under way

    def join(self, other: StopRequest) -> None:
        """Count the request that another handler took, so that its repeats are repeats here too."""
        if other.signum and not self.signum:
            self.signum, self._since = other.signum, other._since


def raise_on_stop() -> StopRequest:
    """From now on the first SIGTERM or SIGINT raises `Interrupted` in the main thread."""

    def interrupt(signum: int) -> None:
        raise Interrupted(signum)

    request = StopRequest(interrupt, end_by_signal)
    for signum in _SIGNALS:
        signal.signal(signum, request)
    return request


@contextmanager
def defer_stop() -> Iterator[StopRequest]:
    """Within, the first SIGTERM or SIGINT is only noted: for work that comes to an orderly stop of its own.

    Who is asked raises when it has stopped. A request that is made anew after `REPEATS_S` seconds ends the process at
    once. Outside the main thread, where Python takes no signals, nothing is deferred.
    """
    with _install_handler(StopRequest(_do_nothing, end_by_signal)) as request:
        yield request


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], None]]:
    """As `defer_stop`, in a process whose handlers are somebody else's. Gives what is to be called between two pieces
    of work: it does what the handler of before would have done, if a signal has come. So does a request made anew.
    """
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}

    def pass_on(signum: int) -> None:
        handler = before[signal.Signals(signum)]
        if not callable(handler):
            raise Interrupted(signum)
        handler(signum, None)

    with _install_handler(StopRequest(_do_nothing, pass_on)) as request:
        yield lambda: pass_on(request.signum) if request.signum else None


@contextmanager
def _install_handler(request: StopRequest) -> Iterator[StopRequest]:
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {signum: signal.signal(signum, request) for signum in _SIGNALS}
    handlers = [handler for handler in before.values() if isinstance(handler, StopRequest)]
    for handler in handlers:
        request.join(handler)
    try:
        yield request
    finally:
        for handler in handlers:
            handler.join(request)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _do_nothing(signum: int) -> None:
    pass


def block_stop_signals() -> None:
    """Called in a helper thread: it takes no SIGTERM and SIGINT from now on.

    Of two that come at once the kernel may give both to a thread that waits, and the main thread would sleep on.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def end_by_signal(signum: int) -> None:
    """End this process by the signal's default action."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
