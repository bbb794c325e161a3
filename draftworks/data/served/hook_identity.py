"""Digest of what a redaction hook is: its words, and the files among them. Torch-free; nothing is run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from draftworks.config.served import RedactionSpec
from draftworks.errors import ConfigError
from draftworks.storage.identity import FileDigests, digest


def digest_hook(hook: RedactionSpec | None, folder: Path, digests: FileDigests) -> str | None:
    """Return a digest that changes with the hook: with its words, and with every word's file, seen from `folder`.

    A program that is found by PATH counts by its name, and what a script imports does not count.

    Raises:
        ConfigError: the module of a function is not installed.
    """
    if hook is None:
        return None
    if hook.command is not None:
        files = [folder / word for word in hook.command]
        known = [digests.of_file(path) if _is_file(path) else None for path in files]
        return digest([hook.command, known])
    module = str(hook.function).partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"redaction.function: the module {module} is not installed: pip install the package that has it"
        )
    return digest([hook.function, digests.of_file(Path(found.origin)) if found.has_location and found.origin else None])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
