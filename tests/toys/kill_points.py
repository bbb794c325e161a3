"""A process that is killed before any one of its uses of the file system."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable


def killed_before(event: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child process that is killed before its `event`-th use of the file system, if it gets so far."""
    child = os.fork()
    if child == 0:
        _work_until(event, work)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0
    return killed


def _work_until(event: int, work: Callable[[], object]) -> None:
    uses = itertools.count()

    def hook(name: str, _: tuple) -> None:
        if (name == "open" or name.startswith(("os.", "shutil."))) and next(uses) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)
