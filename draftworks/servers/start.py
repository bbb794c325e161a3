"""How an engine's processes are started: they end with their parent from the moment they start, and its API key is not seen.

Engines' processes see to their end themselves, but only after seconds of imports; if this process is killed during that time,
they would be left behind. Run as a module (`start FOLDER MODULE ARG…`), this does the same to the child processes of another
program, whether it spawns or forks them.

The key of a server that others than this machine can reach is in a file of its owner, and in no command line or log. Servers
take the key as an argument, and log their arguments. So the key is added to the arguments inside the server's own process,
where no list of processes shows it, and is removed from what that process logs.

Standard library only, because it runs in the engine's environment.
"""

from __future__ import annotations

import logging
import os
import runpy
import secrets
import shlex
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from draftworks.distributed import stop_signals

VARIABLE = "DRAFTWORKS_SERVER_KEY_FILE"
"""Environment variable with the path of the key's file, for the process of a server."""
HIDDEN = "***"
_BYTES = 32


def make_key_file(path: Path) -> None:
    """Write a new random key to a file that did not exist, and that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(secrets.token_urlsafe(_BYTES))
        stream.flush()
        os.fsync(descriptor)


def read_key(path: Path) -> str:
    return path.read_text(encoding="ascii")


def build_headers(key: str | None) -> dict[str, str]:
    """Return the HTTP headers by which a server with this key accepts a request; none for a server without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def take_key_arguments(environment: MutableMapping[str, str]) -> list[str]:
    """Return the arguments for a server with the key that the environment names, which this process then does not log.

    The variable is removed; without it there are no arguments.
    """
    path = environment.pop(VARIABLE, None)
    if path is None:
        return []
    key = read_key(Path(path))
    hide_in_log_records(key)
    return [f"--api-key={key}"]  # one word: a key may begin with a dash


def hide_in_log_records(key: str) -> None:
    """Replace a key in the message of every log record that this process makes from now on."""
    make_record = logging.getLogRecordFactory()

    def make_hiding_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        if key in message:
            record.msg, record.args = message.replace(key, HIDDEN), ()
        return record

    logging.setLogRecordFactory(make_hiding_record)


@contextmanager
def tie_children_to_parent(folder: Path) -> Iterator[None]:
    """Make processes that multiprocessing spawns inside this context end with the thread that starts them.

    Args:
        folder: existing folder for the script that they are spawned through; no other process may use it at the same
            time.
    """
    executable = spawn.get_executable()
    shim = folder / "python-tied-to-parent"
    shim.write_text(f'#!/bin/sh\nexec {shlex.join([*stop_signals.build_shim_command(), sys.executable])} "$@"\n')
    shim.chmod(0o755)
    spawn.set_executable(str(shim))
    try:
        yield
    finally:
        spawn.set_executable(executable)


def build_command(folder: Path, module: str) -> list[str]:
    """Return the words between a Python and a module's arguments that run the module with its children tied to it."""
    return ["-m", __name__, str(folder), module]


def _run(folder: str, module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments, *take_key_arguments(os.environ)]
    os.register_at_fork(after_in_child=stop_signals.die_with_parent)
    with tie_children_to_parent(Path(folder)):
        # The module has to run as the main module: the processes that it spawns look up their functions there.
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(*sys.argv[1:])
