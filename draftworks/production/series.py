"""The series of one server: a file of JSON lines that only grows at its end, and is thinned when it is long.

    {var}/observed/{target}/{server}/series.jsonl   a header, then a reading per line
    {var}/observed/{target}/{server}/.lock/         the lease of whoever reads the server and appends

A server is read while the lease is held, so readings are in the order in which they were taken, however many observers there
are. A line that a killed process left unfinished is read as absent, and is cut off by the next one that appends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.production.readings import Reading, thin
from draftworks.storage.atomic import publish_file
from draftworks.storage.file_lock import hold_lock
from draftworks.storage.names import require_name
from draftworks.storage.regular_files import parse_json, read_bytes

FOLDER, SERIES, LOCK = "observed", "series.jsonl", ".lock"
SCHEMA_VERSION = 1
MAX_READINGS = 10_000
MAX_BYTES = 64 << 20
CLOCK_TOLERANCE_S = 300.0


@dataclass(frozen=True)
class ServerSeries:
    """What was read from one server, oldest first.

    Attributes:
        var: folder of all results.
        most: readings from which on the series is thinned.
    """

    var: Path
    target: str
    server: str
    most: int = MAX_READINGS

    @property
    def folder(self) -> Path:
        return self.var / FOLDER / require_name(self.target) / require_name(self.server)

    @property
    def file(self) -> Path:
        return self.folder / SERIES

    def read(self) -> list[Reading]:
        """Return all readings; none if the server was never read.

        Raises:
            StoreError: the file is damaged, or of another server.
        """
        try:
            content = read_bytes(self.file, MAX_BYTES)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.file}: cannot be read as the series of a server: {error}") from None
        lines = content.split(b"\n")[:-1]  # what follows the last line end was not finished
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                values = parse_json(line)
                if number == 1:
                    self._require_header(values)
                else:
                    found.append(Reading.from_json(values))
            except (ValueError, StoreError) as error:
                raise StoreError(
                    f"{self.file}, line {number}: {error}. Move the file away to begin a new series"
                ) from None
        return found

    def append(self, take: Callable[[list[Reading]], Reading]) -> list[Reading]:
        """Add a reading to the series, and return all readings.

        Args:
            take: reads the server, while no other observer does, and returns the reading. It is given those before it. An
                error of it leaves the series as it is.

        Raises:
            StoreError: the clock of this machine is far behind that of the last reading, or the file is damaged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"another process reads the server {self.server} of {self.target}: waiting"
        with hold_lock(self.folder / LOCK, busy) as lease:
            readings = self.read()
            taken = take(readings)
            if readings and taken.time < readings[-1].time - CLOCK_TOLERANCE_S:
                raise StoreError(
                    f"server {self.server}: the clock of this machine is {readings[-1].time - taken.time:,.0f} s behind the "
                    "last reading. Nothing is recorded"
                )
            readings.append(taken)
            lease.confirm()
            kept = readings if len(readings) <= self.most else thin(readings, self.most - self.most // 4)
            if len(kept) < len(readings) or len(kept) == 1:  # a new file has a header
                self._rewrite(kept)
            else:
                self._append_line(taken)
            return kept

    def _append_line(self, reading: Reading) -> None:
        handle = os.open(self.file, os.O_RDWR)
        try:
            end = _find_last_line_end(handle)
            os.ftruncate(handle, end)
            os.pwrite(handle, _format_line(reading), end)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _rewrite(self, readings: list[Reading]) -> None:
        for leftover in self.folder.glob(f".{SERIES}.*.tmp"):
            leftover.unlink(missing_ok=True)
        header = {"schema": SCHEMA_VERSION, "target": self.target, "server": self.server}
        with publish_file(self.file) as staging:
            staging.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(map(_format_line, readings)))

    def _require_header(self, values: object) -> None:
        expected = {"schema": SCHEMA_VERSION, "target": self.target, "server": self.server}
        if values != expected:
            raise StoreError(f"expected the header {json.dumps(expected)}")


def _format_line(reading: Reading) -> bytes:
    return json.dumps(reading.to_json(), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _find_last_line_end(handle: int) -> int:
    """Return the offset after the last line end of a file, looking from its end."""
    size, block = os.fstat(handle).st_size, 1 << 16
    end = size
    while end > 0:
        begin = max(0, end - block)
        found = os.pread(handle, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
