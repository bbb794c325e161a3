"""Raw rows of JSONL, JSON and Parquet files, streamed one at a time, each with its file and line; and rejected rows.

What cannot be read as a row is yielded as a `Rejection`; what makes the rest of a file unreadable is a DataError.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.errors import DataError
from draftworks.storage.files import open_regular, parse_json, require_file

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is rejected without being held in memory."""
EXCERPT_LENGTH = 200
_PIECE = 1 << 20
_WHITESPACE = " \t\r\n"


@dataclass(frozen=True)
class RawRow:
    """A decoded row. `line` counts from 1; in Parquet it is the row number."""

    file: str
    line: int
    value: Any


@dataclass(frozen=True)
class Rejection:
    """A row that cannot be used: file, line, reason, and `excerpt`, its beginning."""

    file: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.excerpt}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=True)


def reject(row: RawRow, reason: str) -> Rejection:
    """Return the rejection of a decoded row."""
    try:
        text = json.dumps(row.value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = repr(type(row.value))
    return Rejection(row.file, row.line, make_excerpt(reason), make_excerpt(text))


def make_excerpt(text: str) -> str:
    """Return the beginning of a text, printable in any encoding."""
    cut = text if len(text) <= EXCERPT_LENGTH else text[:EXCERPT_LENGTH] + "..."
    return cut.encode("utf-8", "backslashreplace").decode()


def read_rows(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[RawRow | Rejection]:
    """Stream the rows of one file. A `.json` file may hold one list, or one object per line.

    Raises:
        DataError: the file cannot be read, or breaks off where the number of lost rows is unknown.
    """
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix.lower() == ".json" and is_json_list(path):
            yield from _list_rows(path)
        else:
            yield from _line_rows(path, max_line_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def count_rows(path: Path, most: int, most_bytes: int) -> int | None:
    """Return how many rows a file has at most, `most` if there are more, without decoding them.

    None for a JSON list of more than `most_bytes`, which would have to be read whole. A line of more than `_PIECE` bytes
    counts as several.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return min(most, pq.read_metadata(require_file(path)).num_rows)
        if path.suffix.lower() == ".json" and is_json_list(path):
            return None if path.stat().st_size > most_bytes else sum(1 for _ in islice(_list_rows(path), most))
        with open_regular(path) as stream:
            return sum(1 for _ in islice(iter(lambda: stream.readline(_PIECE), b""), most))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _line_rows(path: Path, max_line_bytes: int) -> Iterator[RawRow | Rejection]:
    with open_regular(path) as stream:
        number = 0
        while raw := stream.readline(max_line_bytes + 1):
            number += 1
            if len(raw) > max_line_bytes and not raw.endswith(b"\n"):
                _skip_line(stream, max_line_bytes)
                start = raw[: 4 * EXCERPT_LENGTH].decode("utf-8", "replace")
                yield Rejection(str(path), number, f"line longer than {max_line_bytes:,} bytes", make_excerpt(start))
                continue
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip():
                yield decode_line(raw, str(path), number)


def _skip_line(stream: Any, chunk: int) -> None:
    while (rest := stream.readline(chunk)) and not rest.endswith(b"\n"):
        pass


def decode_line(raw: bytes, file: str, line: int) -> RawRow | Rejection:
    """Return the row of a line of JSON."""
    try:
        return RawRow(file, line, parse_json(raw.decode("utf-8")))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start})"
    except ValueError as error:
        reason = f"invalid JSON ({error})"
    return Rejection(file, line, reason, make_excerpt(raw[: 4 * EXCERPT_LENGTH].decode("utf-8", "replace").rstrip()))


def is_json_list(path: Path) -> bool:
    """Whether a `.json` file holds one list, rather than one object per line."""
    with open_regular(path) as stream:
        return stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _list_rows(path: Path) -> Iterator[RawRow]:
    """Yield the elements of one JSON list, decoded one by one, so that only one exists as objects at a time."""
    decoder, line = json.JSONDecoder(), 1
    position = counted = 0
    try:
        text = path.read_text(encoding="utf-8-sig")
        position = _next_token(text, 0) + 1
        while (start := _next_token(text, position)) < len(text) and text[start] != "]":
            line += text.count("\n", counted, start)
            counted = start
            value, position = decoder.raw_decode(text, start)
            yield RawRow(str(path), line, value)
            position = _after_element(text, position)
        if start >= len(text):
            raise json.JSONDecodeError("the list is not closed", text, len(text))
        if (rest := _next_token(text, start + 1)) < len(text):
            raise json.JSONDecodeError("text after the list", text, rest)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not a complete JSON list, broken after line {line}: {error}."
            " How many rows are lost cannot be known: repair the file, or convert it to JSONL"
        ) from error


def _after_element(text: str, position: int) -> int:
    """Return the position after the comma that follows an element, or of the closing bracket."""
    position = _next_token(text, position)
    if position < len(text) and text[position] == ",":
        following = _next_token(text, position + 1)
        if following < len(text) and text[following] == "]":
            raise json.JSONDecodeError("a comma before the closing bracket", text, position)
        return position + 1
    if position < len(text) and text[position] != "]":
        raise json.JSONDecodeError("expected a comma or the end of the list", text, position)
    return position


def _next_token(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITESPACE:
        position += 1
    return position


def _parquet_rows(path: Path) -> Iterator[RawRow | Rejection]:
    line = 0
    try:
        with pq.ParquetFile(require_file(path)) as file:
            for batch in file.iter_batches(batch_size=256):
                for value in _batch_values(batch):
                    line += 1
                    if isinstance(value, ValueError):
                        yield Rejection(str(path), line, f"unreadable value ({value})", "")
                    else:
                        yield RawRow(str(path), line, value)
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter for a column's name that is no text
        raise DataError(f"{path}: not a readable Parquet file, broken after row {line}: {error}") from error


def _batch_values(batch: pa.RecordBatch) -> Iterator[Any]:
    """Return rows as dictionaries; a row with a value Python cannot represent (text not UTF-8) as its ValueError."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield ValueError(str(error))
