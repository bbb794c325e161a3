"""The process from which those of a run's steps are forked. Imports no Dagster, so that it can start before it is imported."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver

CODE_LOCATION = "spec_assets.code_location"
_EXECUTOR = "dagster._core.executor.multiprocess"
_STORAGE = "dagster._core.storage.sqlite_storage"


def list_preloaded(module: str) -> Sequence[str]:
    """Return what a step's process has imported from the start. Importing it would otherwise take half the time of a step
    whose result exists.

    Args:
        module: the one that holds the definitions, or makes them.
    """
    return (_EXECUTOR, module, _STORAGE)


def start_ahead(module: str) -> None:
    """Start that process now, so that it imports while this one does; Dagster would start it with the first step."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(list_preloaded(module)))
    forkserver.ensure_running()
