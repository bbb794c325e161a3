"""Files of lines that only grow: each line is whole or not there, wherever a writer is killed.

Whoever writes holds a lease, so that a line without its end is one that a killed process has not finished: readers leave
it out, and the next writer cuts it off. Any other line that is no event is damage, and nothing is changed then.

And records that are replaced as a whole, each former one of which is kept under its number: `NumberedRecord`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from draftworks.errors import StoreError
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.files import fsync, open_regular, parse_json, publish_file, publish_json, read_json

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


HISTORY, LOCK = "history", ".lock"
MAX_RECORD_BYTES = 1 << 20
_DIGITS = 8


class Numbered(Protocol):
    """A record with its number, 1 for the first, then one more with each."""

    @property
    def number(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...


Record = TypeVar("Record", bound=Numbered)


@dataclass(frozen=True)
class NumberedRecord(Generic[Record]):
    """A record in a file, replaced by one rename under a lease; each one before it is kept and never changed.

        folder/{name}                  the newest
        folder/history/{number}.json   each before it
        folder/.lock/                  the lease of whoever replaces it

    A record is copied to the history before it is replaced. So at any moment the history and the file together hold every
    record that there ever was and no other, wherever a process is killed. Readers need one read and no lock.

    Attributes:
        parse: returns the record in a file's JSON, given what an error is to name; StoreError if it is no valid one.
        what: the kind of record, in errors.
        remedy: what to do with a damaged file, a sentence.
    """

    folder: Path
    name: str
    parse: Callable[[Any, str], Record]
    what: str
    remedy: str

    def find(self) -> Record | None:
        """Return the newest record, by one read; None if there is none. Raises StoreError for a damaged one."""
        return self._read(self.folder / self.name)

    def read_history(self) -> tuple[Record, ...]:
        """Return every record, oldest first, the newest last; without those whose files are gone."""
        newest = self.find()  # first: if it is replaced meanwhile, the history has it
        if newest is None:
            return ()
        earlier = (self._read(self._locate(number)) for number in range(1, newest.number))
        return (*(record for record in earlier if record is not None), newest)

    def replace(self, make: Callable[[Record | None], Record | None], busy: str) -> Record | None:
        """Replace the newest record; return the one that is then there.

        Args:
            make: returns the next record from the present one, or None to leave it as it is. It is called under the
                lease, and an error of it leaves everything as it is.
            busy: log message while another process replaces it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(self.folder / LOCK, busy) as lease:
            newest = self.find()
            made = make(newest)
            if made is None:
                return newest
            if made.number != (1 if newest is None else newest.number + 1):
                raise StoreError(f"{self.folder}: a record of number {made.number} cannot follow")
            if newest is not None and not self._locate(newest.number).exists():
                (self.folder / HISTORY).mkdir(exist_ok=True)
                _sweep(self.folder / HISTORY, "*.tmp")
                publish_json(self._locate(newest.number), newest.to_json())
            _sweep(self.folder, f".{self.name}.*.tmp")
            lease.confirm()
            publish_json(self.folder / self.name, made.to_json())
            return made

    def _locate(self, number: int) -> Path:
        return self.folder / HISTORY / f"{number:0{_DIGITS}}.json"

    def _read(self, path: Path) -> Record | None:
        try:
            values = read_json(path, MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read as {self.what}: {error}. {self.remedy}") from None
        return self.parse(values, str(path))


def _sweep(folder: Path, pattern: str) -> None:
    """Remove staging files of killed processes: those that are only written under the lease, which the caller holds."""
    for leftover in folder.glob(pattern):
        leftover.unlink(missing_ok=True)
