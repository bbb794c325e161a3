"""A folder for what an engine keeps beside the results: logs, and files on their way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def engine_folder(path: Path) -> Iterator[Path]:
    """The path of a folder, for the engine to create. It is gone after success; after an error its log is worth reading."""
    yield path
    shutil.rmtree(path, ignore_errors=True)
