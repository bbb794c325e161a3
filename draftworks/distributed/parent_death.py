"""Ends a process when its parent ends, so that no process of a killed run keeps a GPU.

As a script it is a shim that a launcher puts before a command: `parent_death.py PARENT_PID COMMAND ARG…` requests the
signal from the kernel and then executes the command. It replaces `preexec_fn`, because Python code is not safe between
fork and exec in a process with threads, such as Dagster's. Standard library only: it is started without site-packages.
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
