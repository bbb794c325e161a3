"""Die when the parent does, so that no process of a killed run keeps a GPU.

Run as a script it is the shim that a launcher puts before a command: `parent_death.py PARENT_PID COMMAND ARG…` asks the
kernel for the signal and becomes the command. A shim instead of `preexec_fn`, because no Python may safely run
between fork and exec in a process that has threads, and Dagster's has. Standard library only: it is started without
site-packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 1.0


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """From now on, the end of the parent sends `signum` to this process.

    On Linux the kernel does it, also when this process is stuck in native code; note that it watches the *thread* that
    started this process. Elsewhere a thread looks once per second. `parent` is the expected parent's pid, for
    callers who know it: a parent that is gone already counts as its end.
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
    """From now on, the end of the parent sends SIGTERM to this process, and SIGKILL if it still lives `grace_s` later."""
    parent = os.getppid()

    def kill_after_grace() -> None:
        # Of two signals that come at once the kernel may give both to this thread, and the main thread would sleep on.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while os.getppid() == parent:
            time.sleep(_WATCH_INTERVAL_S)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_after_grace, name=end_with_parent.__name__, daemon=True).start()
    die_with_parent(signal.SIGTERM, parent)


def watch_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Return never: send `signum` to this process as soon as its parent is no longer `parent`."""
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL_S)
    os.kill(os.getpid(), signum)


def build_shim_command() -> list[str]:
    """The words before a command that make the kernel end it when this process ends; none where there is no such kernel."""
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def _become_command(arguments: list[str]) -> None:
    parent, *command = arguments
    # A signal that the parent ignores or blocks would be ignored or blocked by the command too.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGTERM, parent=int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become_command(sys.argv[1:])
