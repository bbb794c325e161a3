"""JSON lines in files of a bounded size, appended whole: a kill costs at most the line that is being written.

Every process writes files of its own, begun anew at each start, so nothing is ever appended to a half line.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

PREFIX, SUFFIX = "requests-", ".jsonl"


class LineFiles:
    """The files of one process in a folder, one of them open. Not for several threads.

    Args:
        max_bytes: size from which on a new file is begun; one that is full is never touched again.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._begun = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._count = 0
        self._handle: int | None = None
        self._size = 0
        self._last = folder

    def append(self, lines: bytes) -> None:
        """Append whole lines; what was written of them before an error is taken back.

        Raises:
            OSError: the disk is full, the folder cannot be written, or another error of the system.
        """
        handle = self._open(len(lines))
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(handle, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, self._size)
            self.close()  # the next one is begun anew: here half a line may be left
            raise
        self._size += len(lines)

    def find_problem(self) -> str | None:
        """Return why no line can be written now, by beginning a file and taking it away; None if one can."""
        try:
            self._open(0)
            self.close()
            self._last.unlink()
        except OSError as error:
            return str(error)
        return None

    def close(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _open(self, nbytes: int) -> int:
        full = self._size > 0 and self._size + nbytes > self._max_bytes
        if self._handle is not None and (full or os.fstat(self._handle).st_nlink == 0):  # 0: somebody removed it
            self.close()
        if self._handle is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            name = f"{PREFIX}{self._begun}-{os.getpid()}-{self._count:05d}{SUFFIX}"
            self._count += 1
            self._last = self._folder / name
            self._handle = os.open(self._last, flags, 0o600)
            self._size = 0
        return self._handle
