"""Files of lines that only grow: each line is whole or not there, wherever a writer is killed.

Whoever writes holds a lease, so that a line without its end is one that a killed process has not finished: readers leave
it out, and the next writer cuts it off. Any other line that is no event is damage, and nothing is changed then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from draftworks.errors import StoreError
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.files import fsync, open_regular, parse_json, publish_file

Event = TypeVar("Event")


class Line(NamedTuple):
    """A whole line: the offset of its first byte, and its content without the line end."""

    start: int
    content: bytes


def read_lines(path: Path, cursor: int = 0) -> Iterator[Line]:
    """Yield the whole lines from a byte offset on; of a file that grows meanwhile, those that are found.

    Raises:
        OSError: it is no file, or cannot be read.
    """
    with open_regular(path) as stream:
        stream.seek(cursor)
        for line in stream:
            if not line.endswith(b"\n"):
                return
            yield Line(cursor, line[:-1])
            cursor += len(line)


def append_lines(path: Path, lines: Iterable[bytes]) -> list[int]:
    """Append lines after the last whole one, and return where each starts, once the disk has them.

    The caller holds a lease. A process that is killed here has appended some first ones of the lines.
    """
    is_new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = _find_end(handle)
        if os.fstat(handle).st_size > end:
            os.ftruncate(handle, end)
        starts, content = [], bytearray()
        for line in lines:
            starts.append(end + len(content))
            content += line + b"\n"
        written = 0
        with memoryview(content) as left:
            while written < len(left):
                written += os.pwrite(handle, left[written:], end + written)
        os.fsync(handle)
    finally:
        os.close(handle)
    if is_new:
        fsync(path.parent)
    return starts


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Replace a file's lines by others, all at once. The caller holds a lease."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    with publish_file(path) as staging, staging.open("wb") as stream:
        stream.writelines(line + b"\n" for line in lines)


def _find_end(handle: int) -> int:
    """Return the offset after the last line end of a file, looking from its end."""
    end, block = os.fstat(handle).st_size, 1 << 16
    while end > 0:
        begin = max(0, end - block)
        found = os.pread(handle, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


@dataclass(frozen=True)
class EventLog(Generic[Event]):
    """The events of one file, which any number of processes append to, one after the other.

    Attributes:
        parse: returns the event of a line. Raises ValueError or StoreError if it is none.
        format: returns the line of an event.
        purpose: what the file is, for messages; `remedy` is what to do about damage.
        header: the JSON of the first line, which says whose events they are; None for a file without one.
        lock: the lease's folder, by default beside the file.
    """

    path: Path
    parse: Callable[[bytes], Event]
    format: Callable[[Event], bytes]
    purpose: str
    remedy: str = "Nothing is changed: restore the file from a backup, or remove the line"
    header: Mapping[str, Any] | None = None
    lock: Path | None = None
    max_bytes: int = 256 << 20
    max_line_bytes: int = 1 << 16

    def read(self) -> list[Event]:
        """Return all events, oldest first; none without a file.

        Raises:
            StoreError: the file cannot be read, or a whole line of it is no event.
        """
        return self._parse(self._read_lines())

    def append(
        self,
        make: Callable[[list[Event]], Sequence[Event]],
        busy: str = "",
        shorten: Callable[[list[Event]], list[Event]] = lambda events: events,
    ) -> list[Event]:
        """Append what `make` returns for the events so far, and return it. No other process writes meanwhile.

        An error of `make` leaves the file as it is.

        Args:
            busy: log message while another process writes.
            shorten: returns the events that are kept, from all; where they are fewer, the file is replaced.

        Raises:
            StoreError: the file is damaged, or this process lost the lease.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.lock or self.path.with_name(f".{self.path.name}.lock")
        with hold_lock(lock, busy or f"{self.path} is being written by another process: waiting") as lease:
            lines = self._read_lines()
            events = self._parse(lines)
            added = list(make(list(events)))
            if added:
                kept = shorten([*events, *added])
                lease.confirm()
                header = [] if self.header is None else [json.dumps(self.header).encode()]
                if len(kept) < len(events) + len(added):
                    write_lines(self.path, [*header, *map(self.format, kept)])
                else:
                    append_lines(self.path, [*([] if lines else header), *map(self.format, added)])
            return added

    def _read_lines(self) -> list[bytes]:
        try:
            if self.path.stat().st_size > self.max_bytes:
                raise OSError(f"larger than {self.max_bytes:,} bytes")
            return [line.content for line in read_lines(self.path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read as {self.purpose}: {error}") from None

    def _parse(self, lines: Sequence[bytes]) -> list[Event]:
        events = []
        for number, line in enumerate(lines, start=1):
            try:
                if len(line) > self.max_line_bytes:
                    raise ValueError(f"longer than {self.max_line_bytes:,} bytes")
                if number > 1 or self.header is None:
                    events.append(self.parse(line))
                elif parse_json(line) != self.header:
                    raise ValueError(f"expected the header {json.dumps(self.header)}")
            except (ValueError, StoreError) as error:
                raise StoreError(
                    f"{self.path}, line {number}: {error}: not one of {self.purpose}. {self.remedy}"
                ) from None
        return events
