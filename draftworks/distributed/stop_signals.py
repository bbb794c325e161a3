"""Stop signals, and the death of a parent. Standard library only.

Slurm sends SIGTERM to every process of a job, and torchrun forwards its own, so that a rank receives two within a
millisecond; a terminal does the same with Ctrl-C. A handler that restored the default action after the first signal
would be killed by the second before anything is saved.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

REPEATS_S = 5.0
"""Seconds after the first signal in which further signals belong to the same request."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REPEAT_NOTICE = b"already stopping; a signal more than %d s after the first one ends it at once\n" % REPEATS_S


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT was received. Handlers save their state within the launcher's grace period and re-raise it.

    The exit code is 128 plus the signal's number, also in torchelastic's error file.
    """

    def __init__(self, signum: int, more: str = "") -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}{more}")
        self.signum = signum


class StopRequest:
    """A handler of SIGTERM and SIGINT that separates the first request from its repeats.

    Args:
        first: called with the signal's number at the first request; may raise.
        insisted: called at a signal more than `REPEATS_S` seconds after the first one.

    Attributes:
        signum: the signal that requested the stop, or 0.
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
                os.write(2, _REPEAT_NOTICE)  # print is not reentrant, and the handler may interrupt one

    def join(self, other: StopRequest) -> None:
        """Take over the request of another handler, so that its repeats are repeats here too."""
        if other.signum and not self.signum:
            self.signum, self._since = other.signum, other._since


def raise_on_stop() -> StopRequest:
    """Install a handler by which the first SIGTERM or SIGINT raises `Interrupted` in the main thread."""

    def interrupt(signum: int) -> None:
        raise Interrupted(signum)

    request = StopRequest(interrupt, end_by_signal)
    for signum in _SIGNALS:
        signal.signal(signum, request)
    return request


@contextmanager
def defer_stop() -> Iterator[StopRequest]:
    """In the block, only record the first SIGTERM or SIGINT, for code that checks for it and stops at a safe point.

    That code raises after it has stopped. A second signal after `REPEATS_S` seconds ends the process at once. Outside the
    main thread, where Python receives no signals, nothing is deferred.
    """
    with _install_handler(StopRequest(_do_nothing, end_by_signal)) as request:
        yield request


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], None]]:
    """Defer stop signals as `defer_stop` does, in a process with handlers of another library, such as Dagster's.

    Yields a function to call between two pieces of work: if a signal was received, it calls the previous handler. A second
    signal after `REPEATS_S` seconds calls the previous handler at once.
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
    """Block SIGTERM and SIGINT in the calling helper thread.

    The kernel may deliver two simultaneous signals to a waiting thread, and the main thread would not wake up.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def end_by_signal(signum: int) -> None:
    """End this process by the default action of the signal."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 1.0


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have `signum` sent to this process when its parent ends.

    On Linux the kernel sends it, also while this process is in native code; it watches the *thread* that started this
    process. On other systems a thread checks once per second. `parent` is the pid of the expected parent, if the caller
    knows it: if that process has ended already, the signal is sent at once.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=watch_parent, args=(parent, signum), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def end_with_parent(grace_s: float) -> None:
    """Have SIGTERM sent to this process when its parent ends, and SIGKILL `grace_s` seconds later if it still runs."""
    parent = os.getppid()

    def kill_after_grace() -> None:
        # The kernel may deliver two simultaneous signals to this thread, and the main thread would not wake up.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while os.getppid() == parent:
            time.sleep(_WATCH_INTERVAL_S)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_after_grace, name=end_with_parent.__name__, daemon=True).start()
    die_with_parent(signal.SIGTERM, parent)


def watch_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Poll until the parent of this process is no longer `parent`, then send `signum` to this process."""
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL_S)
    os.kill(os.getpid(), signum)


def build_shim_command() -> list[str]:
    """Return the command prefix by which the kernel ends a command with this process; empty except on Linux."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def _become_command(arguments: list[str]) -> None:
    parent, *command = arguments
    # The command would inherit ignored and blocked signals of the parent.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGTERM, parent=int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become_command(sys.argv[1:])
