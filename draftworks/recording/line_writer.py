"""A bounded queue and the one thread that writes it: whoever hands something over never waits, and never sees an error."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftworks.recording.line_files import LineFiles
from draftworks.storage.words import format_count

T = TypeVar("T")
TELL_EVERY_S = 60.0
_AT_ONCE = 64
"""Requests whose lines are appended together."""


@dataclass
class WriterCounts:
    """What became of the requests that were handed over.

    Attributes:
        no_room: dropped because the queue was full, as on a slow disk.
        no_disk: dropped because their lines could not be written.
        unreadable: those of which no line could be made.
    """

    written: int = 0
    no_room: int = 0
    no_disk: int = 0
    unreadable: int = 0

    @property
    def lost(self) -> int:
        return self.no_room + self.no_disk + self.unreadable

    def describe(self) -> str:
        said = f"{format_count(self.written, 'line')} written"
        reasons = {
            "the queue was full": self.no_room,
            "they could not be written": self.no_disk,
            "no line could be made of them": self.unreadable,
        }
        why = "; ".join(f"{count:,}: {reason}" for reason, count in reasons.items() if count)
        return f"{said}, {self.lost:,} lost ({why})" if why else said


class LineWriter(Generic[T]):
    """Writes what requests were as lines.

    Args:
        make_line: makes the line of one, with its end; called in the writing thread.
        tell: is told what is lost, at once and then at most once in `TELL_EVERY_S`; called in the writing thread.
        max_items, max_bytes: what may wait.
    """

    def __init__(
        self,
        files: LineFiles,
        make_line: Callable[[T], bytes],
        tell: Callable[[str], None],
        max_items: int = 10_000,
        max_bytes: int = 64 << 20,
    ) -> None:
        self.counts = WriterCounts()
        self._files, self._make_line, self._tell = files, make_line, tell
        self._max_items, self._max_bytes = max_items, max_bytes
        self._waiting: deque[tuple[T, int]] = deque()
        self._held = 0
        self._closing = False
        self._changed = threading.Condition()
        self._told_at, self._told_of = -TELL_EVERY_S, 0
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def offer(self, item: T, nbytes: int) -> None:
        """Hand something over, of about so many bytes in memory; it is dropped and counted if there is no room for it."""
        with self._changed:
            if self._closing or len(self._waiting) >= self._max_items or self._held + nbytes > self._max_bytes:
                self.counts.no_room += 1
                return
            self._waiting.append((item, nbytes))
            self._held += nbytes
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most so long; then what still waits is counted as lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self.counts.no_room += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        while batch := self._take():
            lines = [line for item, _ in batch if (line := self._try_line(item))]
            self._append(lines)
            with self._changed:
                self._held -= sum(nbytes for _, nbytes in batch)
            self._tell_losses()
        self._files.close()

    def _take(self) -> list[tuple[T, int]]:
        """Wait for what is to be written, and return some of it; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]

    def _try_line(self, item: T) -> bytes:
        try:
            return self._make_line(item)
        except Exception as error:  # of a request that nobody expected: the proxy goes on
            self.counts.unreadable += 1
            self._problem = f"{type(error).__name__} while a line was made"
            return b""

    def _append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            self._files.append(b"".join(lines))
            self.counts.written += len(lines)
        except OSError as error:
            self.counts.no_disk += len(lines)
            self._problem = str(error)

    def _tell_losses(self) -> None:
        lost, now = self.counts.lost, time.monotonic()
        if lost > self._told_of and now >= self._told_at + TELL_EVERY_S:
            self._told_at, self._told_of = now, lost
            self._tell(f"{self.counts.describe()}{f'. The last error: {self._problem}' if self._problem else ''}")
