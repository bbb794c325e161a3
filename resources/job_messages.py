"""Pipes messages and log of a scheduler's job, which may outlive the reader and may be submitted several times."""

from __future__ import annotations

import codecs
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import dagster as dg
from dagster_pipes import PipesDefaultMessageWriter, PipesParams

_BOOKMARK_INTERVAL_S = 1.0


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
        if position == self._saved or not now and time.monotonic() - self._saved_at < _BOOKMARK_INTERVAL_S:
            return
        self._saved, self._saved_at = position, time.monotonic()
        staging = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            staging.write_text(str(position))
            os.replace(staging, self.path)


_FIRST_KEY = b'{"__dagster_pipes_version"'
_INTERVAL_S = 0.2
REPORT = "report"


class JobMessages(dg.PipesFileMessageReader):
    """Reads the messages of all submissions of one job as one stream, and leaves the file in place.

    What an earlier reader has passed on, as `bookmark` says, is not passed on again. Reports count from the whole file,
    but only those of the last submission: one that was lost after its report is repeated by the next.
    """

    def __init__(self, path: Path, bookmark: Bookmark) -> None:
        super().__init__(str(path), cleanup_file=False)
        self._file = path
        self._bookmark = bookmark
        self._reports: list[Any] = []
        self._opened = False
        self._closed: Any = None

    @property
    def expected_writer_count(self) -> int:
        return 1

    @contextmanager
    def read_messages(self, handler: Any) -> Iterator[PipesParams]:
        self._file.touch()
        is_over = Event()
        thread = Thread(target=self._follow, args=(handler, is_over), daemon=True)
        thread.start()
        try:
            yield {
                PipesDefaultMessageWriter.FILE_PATH_KEY: str(self._file),
                PipesDefaultMessageWriter.INCLUDE_STDIO_IN_MESSAGES_KEY: False,
            }
        finally:
            is_over.set()
            thread.join()

    def _follow(self, handler: Any, is_over: Event) -> None:
        try:
            position, shown = 0, self._bookmark.read()
            with self._file.open("rb") as stream:
                while True:
                    last_look = is_over.is_set()
                    stream.seek(position)
                    for line in stream:
                        if not line.endswith(b"\n"):
                            break
                        position += len(line)
                        message = parse_message(line)
                        if message is not None:
                            self._pass_on(handler, message, is_new=position > shown)
                    self._bookmark.save(max(position, shown), now=last_look)
                    if last_look:
                        break
                    is_over.wait(_INTERVAL_S)
            for message in (*self._reports, self._closed):
                if message is not None:
                    handler.handle_message(message)
        except BaseException:
            handler.report_pipes_framework_exception(f"{type(self).__name__} reader thread", sys.exc_info())
            raise

    def _pass_on(self, handler: Any, message: dict[str, Any], is_new: bool) -> None:
        if message["method"] == "opened":
            self._reports.clear()
            if not self._opened:
                handler.handle_message(message)
            self._opened = True
        elif message["method"] == "closed":
            self._closed = message  # a next submission opens again: told once, at the end
        elif is_report(message):
            self._reports.append(message)
        elif is_new:
            handler.handle_message(message)


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Return the message in a line; None if there is none.

    A rank that was killed while it wrote leaves a piece of a message, to which the next submission appends its own line.
    """
    for text in (line, line[max(0, line.rfind(_FIRST_KEY)) :]):
        with suppress(ValueError, KeyError, TypeError):
            message = json.loads(text)
            return message if isinstance(message["method"], str) else None
    return None


def is_report(message: dict[str, Any]) -> bool:
    payload = (message.get("params") or {}).get("payload") if message["method"] == "report_custom_message" else None
    return isinstance(payload, dict) and REPORT in payload


def has_report(path: Path) -> bool:
    """Whether the last submission of a job has sent its report."""
    found = False
    with suppress(OSError), path.open("rb") as stream:
        for line in stream:
            if b'"opened"' in line or b'"report_custom_message"' in line:
                message = parse_message(line)
                if message is not None and line.endswith(b"\n"):
                    found = is_report(message) or found and message["method"] != "opened"
    return found


_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_LINE_CHARS = 1000
TAIL_LINES = 30


class LogTail:
    """Copies text that is appended to `path` to this process's stdout, which Dagster shows as the step's compute log.

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
