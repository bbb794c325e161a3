"""Spawned child processes that end with their parent from the moment they start.

SGLang's processes ask the kernel for this themselves, but only after seconds of imports; if this process is killed
during that time, they would be left behind. Run as a module (`child_lifetime FOLDER MODULE ARG…`), it applies the same
to the child processes of another program. It uses the standard library only, because it runs in SGLang's environment.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path

from draftworks.distributed import stop_signals
from draftworks.sglang.api_key import take_key_arguments


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
    with tie_children_to_parent(Path(folder)):
        # The module has to run as the main module: the processes that it spawns look up their functions there.
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(*sys.argv[1:])
