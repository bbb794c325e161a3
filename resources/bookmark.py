"""How far a growing file has been shown, so that another process can go on from there."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_INTERVAL_S = 1.0


@dataclass
class Bookmark:
    """A position in bytes, kept in a small file; a crash loses at most the last second, which is then shown again."""

    path: Path
    _saved: int = -1
    _saved_at: float = field(default=float("-inf"), repr=False)

    def read(self) -> int:
        """Return the saved position; 0 if there is none."""
        try:
            return max(0, int(self.path.read_text()))
        except (OSError, ValueError):
            return 0

    def save(self, position: int, now: bool = False) -> None:
        """Save a position, at most once in a second unless `now`. A disk that cannot take it is no error."""
        if position == self._saved or not now and time.monotonic() - self._saved_at < _INTERVAL_S:
            return
        self._saved, self._saved_at = position, time.monotonic()
        staging = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            staging.write_text(str(position))
            os.replace(staging, self.path)
