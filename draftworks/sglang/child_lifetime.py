"""Spawned child processes that end with their parent from the moment they start.

SGLang's processes ask the kernel for that themselves, but only after seconds of imports: who kills us in that time would
leave them behind. Run as a module it gives another program such children: `child_lifetime FOLDER MODULE ARG…`. Standard
library only: it runs in SGLang's environment.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path

from draftworks.distributed import parent_death


@contextmanager
def tie_children_to_parent(folder: Path) -> Iterator[None]:
    """Within, processes that multiprocessing spawns end with the thread that starts them.

    Args:
        folder: existing, for the file they are spawned through; no other process may use it at the same time.
    """
    before = spawn.get_executable()
    shim = folder / "mortal-python"
    shim.write_text(f'#!/bin/sh\nexec {shlex.join([*parent_death.build_shim_command(), sys.executable])} "$@"\n')
    shim.chmod(0o755)
    spawn.set_executable(str(shim))
    try:
        yield
    finally:
        spawn.set_executable(before)


def build_command(folder: Path, module: str) -> list[str]:
    """The words between a Python and the arguments of a module that it runs, with mortal children."""
    return ["-m", __name__, str(folder), module]


def _run(folder: str, module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    with tie_children_to_parent(Path(folder)):
        # What it spawns looks for its functions in the main module, so it has to be that one.
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(*sys.argv[1:])
