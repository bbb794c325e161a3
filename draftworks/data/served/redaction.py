"""The redaction hook of a deployment: rows go to a command as JSONL and come back as JSONL, line by line.

A row is `{"messages": [{"role": …, "content": …}, …], "source": …}`. The hook may change contents and source, and drops a
row by answering `null`. Nothing that it prints to stderr is kept, and no error quotes a row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from draftworks.config.data import RedactionSpec
from draftworks.data.conversations import Turn
from draftworks.data.served.shapes import MAX_SOURCE_LENGTH, is_unicode
from draftworks.errors import DataError
from draftworks.storage.files import parse_json

MAX_GROWTH = 4
"""An answer may be this many times as long as the rows, and SLACK_BYTES; more ends the hook."""
SLACK_BYTES = 1 << 20
POLL_S = 0.05


@dataclass(frozen=True)
class HookRow:
    """What the hook sees and may change of a row."""

    turns: tuple[Turn, ...]
    source: str

    def to_json(self) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in self.turns]
        return json.dumps({"messages": messages, "source": self.source})


def redact_rows(rows: Sequence[HookRow], hook: RedactionSpec, folder: Path, where: str) -> list[HookRow | None]:
    """Return what the hook makes of the rows, in their order; None for a row that it drops.

    Args:
        folder: working directory of the command.
        where: names the data set in messages.

    Raises:
        DataError: the hook cannot be started, fails, takes too long, writes too much, or answers other than a row per row.
    """
    if not rows:
        return []
    given = "".join(row.to_json() + "\n" for row in rows).encode()
    lines = _call(hook, given, folder, where).splitlines()
    if len(lines) != len(rows):
        raise DataError(f"{where}: redaction: expected {len(rows)} lines for as many rows, found {len(lines)}")
    return [_parse_answer(line, row, number, where) for number, (line, row) in enumerate(zip(lines, rows), start=1)]


def _call(hook: RedactionSpec, given: bytes, folder: Path, where: str) -> bytes:
    """Return the stdout of the hook; it is ended with all its children at a limit."""
    command = hook.command or [sys.executable, "-m", "draftworks.data.served.call_function", str(hook.function)]
    limit = MAX_GROWTH * len(given) + SLACK_BYTES
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(given)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: redaction: {command[0]} cannot be started: {type(error).__name__}") from error
        try:
            code = _wait(process, stdout, hook.timeout_s, limit, where)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            raise DataError(
                f"{where}: redaction: exit code {code}. Its messages are not shown, as they may quote rows: run it by hand"
            )
        if _size(stdout) > limit:
            raise DataError(_describe_excess(where, limit))
        stdout.seek(0)
        return stdout.read()


def _wait(process: subprocess.Popen[bytes], stdout: IO[bytes], timeout_s: float, limit: int, where: str) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        if time.monotonic() > deadline:
            raise DataError(f"{where}: redaction: not done within {timeout_s:g} s (timeout_s): ended")
        if _size(stdout) > limit:
            raise DataError(_describe_excess(where, limit))


def _size(stream: IO[bytes]) -> int:
    return os.fstat(stream.fileno()).st_size


def _describe_excess(where: str, limit: int) -> str:
    return f"{where}: redaction: more than {limit:,} bytes of output for one call: ended"


def _parse_answer(line: bytes, row: HookRow, number: int, where: str) -> HookRow | None:
    try:
        found = parse_json(line.decode("utf-8"))
    except ValueError:
        raise DataError(f"{where}: redaction: line {number} of a call's output is not JSON") from None
    if found is None:
        return None
    messages = found.get("messages") if isinstance(found, dict) else None
    source = found.get("source") if isinstance(found, dict) else None
    roles = (
        [one.get("role") if isinstance(one, dict) else None for one in messages] if isinstance(messages, list) else []
    )
    contents = [
        one["content"] for one in messages or () if isinstance(one, dict) and isinstance(one.get("content"), str)
    ]
    if roles != [turn.role for turn in row.turns] or len(contents) != len(roles):
        raise DataError(
            f"{where}: redaction: line {number} of a call's output: expected the messages of row {number} with the same roles "
            "and contents of text, or null"
        )
    if not isinstance(source, str) or len(source) > MAX_SOURCE_LENGTH:
        raise DataError(f"{where}: redaction: line {number} of a call's output: expected the key source, a short text")
    if not all(content.strip() and is_unicode(content) for content in contents) or not is_unicode(source):
        return None  # nothing is left of a message
    return HookRow(tuple(Turn(role, text) for role, text in zip((turn.role for turn in row.turns), contents)), source)
