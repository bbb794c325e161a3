"""Versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def read_version(package: str) -> str:
    """Return the version of an installed package. Reading it takes milliseconds, and a process keeps what it has imported.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(package)
