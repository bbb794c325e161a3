"""Paths of a registry in messages for a terminal, as short as they can still be followed."""

from __future__ import annotations

import re
from pathlib import Path


def shorten_paths(text: str, registry: Path) -> str:
    """Return a message with the registry's path as from the working folder, or, elsewhere, as its name alone."""
    full = Path(registry).resolve()
    if not full.is_dir():  # then the path itself is what is wrong
        return text
    try:
        short = str(full.relative_to(Path.cwd()))
    except ValueError:
        short = full.name
    for long in sorted({str(full), str(registry)} - {short, "."}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./-]){re.escape(long)}(?![\w-])", short.replace("\\", "/"), text)
    return text
