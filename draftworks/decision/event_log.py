"""An append-only file of JSON lines that several processes and hosts write, one validated event a line. Torch-free.

A line counts once it ends with a newline. So a process that is killed while it writes leaves a line that nobody reads,
and that the next writer removes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.atomic import fsync
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.regular_files import read_bytes

MAX_BYTES = 256 << 20
MAX_LINE_BYTES = 1 << 16

Event = TypeVar("Event")


@dataclass(frozen=True)
class EventLog(Generic[Event]):
    """The events of one file.

    Attributes:
        adapter: validates one event, a frozen dataclass.
        purpose: what the file is, for messages.
    """

    path: Path
    adapter: TypeAdapter[Event]
    purpose: str

    def read(self) -> tuple[Event, ...]:
        """Return all events, oldest first; none without a file.

        Raises:
            StoreError: the file cannot be read, or a whole line of it is no valid event.
        """
        return self._parse(self._read_whole_lines())

    def append(self, make: Callable[[tuple[Event, ...]], Sequence[Event]]) -> tuple[Event, ...]:
        """Append what `make` returns for the events so far, and return it. No other process writes meanwhile.

        An error of `make` leaves the file as it is. A process that is killed here has appended some first ones of the
        events, each of them whole.

        Raises:
            StoreError: the file is damaged, or this process lost the lease.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        busy = f"{self.path} is being written by another process: waiting"
        with hold_lock(self.path.with_name(f".{self.path.name}.lock"), busy) as lease:
            content = self._read_whole_lines()
            added = tuple(make(self._parse(content)))
            if added:
                lease.confirm()
                self._write(added, len(content))
            return added

    def _read_whole_lines(self) -> bytes:
        try:
            content = read_bytes(self.path, MAX_BYTES)
        except FileNotFoundError:
            return b""
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path}: cannot be read as {self.purpose}: {error}") from None
        return content[: content.rfind(b"\n") + 1]

    def _parse(self, content: bytes) -> tuple[Event, ...]:
        found = []
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
                found.append(self.adapter.validate_json(line, strict=True))
            except ValueError as error:
                raise StoreError(
                    f"{self.path}: line {number} is not one of {self.purpose}: {_describe(error)}. Nothing is changed: "
                    "restore the file from a backup, or remove the line"
                ) from None
        return tuple(found)

    def _write(self, events: Sequence[Event], whole: int) -> None:
        content = b"".join(json.dumps(_to_json(event)).encode() + b"\n" for event in events)
        is_new = not self.path.exists()
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(handle).st_size > whole:
                os.ftruncate(handle, whole)
            while content:
                content = content[os.write(handle, content) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        if is_new:
            fsync(self.path.parent)


def _to_json(event: Any) -> dict[str, Any]:
    return asdict(event)


def _describe(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    wrong = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, wrong["loc"])), wrong["msg"])))
