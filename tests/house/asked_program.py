"""A program that says what it was given, then does what its first argument says."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path


def is_open(descriptor: int) -> bool:
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False


def stay() -> None:
    """Until the parent ends."""
    from draftworks.distributed.stop_signals import die_with_parent

    die_with_parent()
    told = {"rank": os.environ["LOCAL_RANK"], "pid": os.getpid(), "parent": os.getppid()}
    os.write(1, f"{json.dumps(told)}\n".encode())  # at once: the other rank writes there too
    time.sleep(60)


GIVEN = {
    "pid": os.getpid(),
    "parent": os.getppid(),
    "session": os.getsid(0),
    "group": os.getpgid(0),
    "descriptors": [each for each in range(256) if is_open(each)],
    "env": dict(os.environ),
    "shown_env": sorted(Path("/proc/self/environ").read_text().split("\0")[:-1]),
    "cwd": os.getcwd(),
    "argv": sys.argv,
    "path": sys.path[0],
    "main": sys.modules["__main__"].__file__,
    "umask": os.umask(0o77),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "signals": {
        each.name: str(signal.getsignal(each))
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)
    },
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": len(os.listdir("/proc/self/task")),
    "name": Path("/proc/self/comm").read_text(),
    "interpreter": os.readlink("/proc/self/exe"),
}
ACTIONS = {
    "tell": lambda: print(json.dumps(GIVEN)),
    "draw": lambda: print(random.random()),
    "echo": lambda: print(sys.stdin.read()),
    "exit": lambda: sys.exit(3),
    "refuse": lambda: sys.exit("refused"),
    "fail": lambda: 1 / 0,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(60),
    "wait": lambda: print(json.dumps(GIVEN), flush=True) or time.sleep(60),
    "stay": stay,
}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]]()
