"""Copies a job's growing log file to the compute log of the step."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path

from resources.bookmark import Bookmark

_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_LINE_CHARS = 1000
TAIL_LINES = 30


class LogTail:
    """Copies what was appended to `path` to this process's stdout, which Dagster shows as the step's compute log.

    The job writes to the file itself, so it never waits for this process, loses nothing if this process dies, and may
    run on another machine. At most `limit_bytes` are copied, plus the last lines; the file itself stays complete.

    Args:
        bookmark: how far an earlier process has copied it, for a job that outlives this one.
    """

    def __init__(self, path: Path, limit_bytes: int, bookmark: Bookmark | None = None) -> None:
        self._path = path
        self._left = limit_bytes
        self._bookmark = bookmark
        self._position = 0 if bookmark is None else bookmark.read()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> None:
        """Copy the output that was written since the last call."""
        if self._left <= 0 or not self._path.exists():
            return
        with self._path.open("rb") as log:
            log.seek(self._position)
            while self._left > 0 and (chunk := log.read(min(_CHUNK_BYTES, self._left))):
                sys.stdout.write(self._decoder.decode(chunk))
                self._left -= len(chunk)
            self._position = log.tell()
        if self._bookmark is not None:
            self._bookmark.save(self._position)
        if self._left <= 0:
            sys.stdout.write(f"\n… the limit of shown output is reached, the whole log is {self._path}\n")
        sys.stdout.flush()

    def finish(self) -> None:
        """Copy the remaining output; if the limit was reached, the last lines."""
        self.copy()
        if self._left <= 0:
            sys.stdout.write("\n".join(["… the last lines:", *read_last_lines(self._path, TAIL_LINES), ""]))
        sys.stdout.flush()


def read_last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a file, long ones cut; an empty list if there is no such file."""
    if not path.exists():
        return []
    with path.open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
        text = log.read().decode("utf-8", errors="replace")
    return [line[:_LINE_CHARS] for line in text.splitlines()[-count:]]
