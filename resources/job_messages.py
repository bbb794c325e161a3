"""Reads the Pipes messages of a scheduler's job, which may outlive the reader and may be submitted several times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import dagster as dg
from dagster_pipes import PipesDefaultMessageWriter, PipesParams

from resources.bookmark import Bookmark

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
