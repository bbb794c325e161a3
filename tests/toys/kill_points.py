"""A process that is killed before any one of its changes of the file system."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable

CHANGES = frozenset(
    {
        *("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"),
        *("os.utime", "sqlite3.connect", "os.posix_spawn", "subprocess.Popen", "socket.connect"),
    }
)
"""Audit events after which a disk, a database or another process may be another. What is written to a file that is open is
none: a kill before the next one of these finds it.
"""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def killed_before(event: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child process that is killed before its `event`-th change of the file system, if it gets so far.

    What it reads is not counted: before a read the files are those before the next change. A fork is what such a test
    costs.
    """
    child = os.fork()
    if child == 0:
        _work_until(event, work)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0
    return killed


def _work_until(event: int, work: Callable[[], object]) -> None:
    changes = itertools.count()

    def hook(name: str, args: tuple) -> None:
        if (name in CHANGES or (name == "open" and args[2] & WRITES)) and next(changes) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)
