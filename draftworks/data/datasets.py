"""Loading a data set of the registry: rows are streamed one at a time, validated and deduplicated, bad rows quarantined.

Rows of JSONL, JSON and Parquet come each with its file and line. What cannot be read as a row is yielded as a `Rejection`;
what makes the rest of a file unreadable is a DataError.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.config.registry_files import DatasetSpec
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, Item
from draftworks.data.formats import RowError, detect_format, find_unread_keys, parse_conversation, parse_tokens
from draftworks.data.rejected import describe_commonest
from draftworks.data.sources import find_dataset_files
from draftworks.data.tokenized import TokenRow
from draftworks.errors import DataError
from draftworks.storage.files import open_regular, parse_json, publish_file, require_file
from draftworks.storage.words import list_fitting

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


SHOWN_REJECTIONS = 3
Kind = Literal["conversations", "tokens"]


@dataclass(frozen=True)
class LoadReport:
    """Counts of a data set's rows.

    Attributes:
        quarantine: file of the rejected ones, one JSON object per line.
        unread: keys of rows and turns that are not read, each with the number of rows that have it.
    """

    files: int
    rows: int
    rejected: int
    duplicates: int
    quarantine: Path
    unread: Mapping[str, int]

    def counts(self) -> dict[str, Any]:
        counted = {name: getattr(self, name) for name in ("files", "rows", "rejected", "duplicates")}
        return {**counted, **({"unread_keys": dict(self.unread)} if self.unread else {})}


@dataclass(frozen=True)
class LoadedConversations:
    """The distinct conversations of a data set, in the order of its files."""

    conversations: tuple[Conversation, ...]
    report: LoadReport


@dataclass(frozen=True)
class LoadedTokens:
    """The distinct pre-tokenized rows of a data set, in the order of its files."""

    rows: tuple[TokenRow, ...]
    report: LoadReport


def detect_kind(dataset: DatasetSpec, root: Path) -> Kind:
    """Return whether a data set holds conversations or token rows; with format `auto` the first usable row decides.

    Raises:
        DataError: no file, an unreadable file, or no row that shows a format.
    """
    if dataset.format != "auto":
        return "tokens" if dataset.format == "tokens" else "conversations"
    reasons = Counter[str]()
    for path in find_dataset_files(dataset, root):
        for row in read_rows(path):
            if isinstance(row, Rejection):
                reasons[row.reason] += 1
                continue
            try:
                return "tokens" if detect_format(row.value) == "tokens" else "conversations"
            except RowError as error:
                reasons[str(error)] += 1
    raise DataError(
        f"data set {dataset.name}: {list_fitting(dataset.files, 60)}: "
        + (f"no row can be read. {describe_commonest(reasons)}" if reasons else "there is no row")
    )


def load_conversations(dataset: DatasetSpec, root: Path, out: Path, max_rejected_share: float) -> LoadedConversations:
    """Load a data set of conversations.

    Args:
        root: the folder that its globs are relative to.
        out: folder for quarantine.jsonl, which is written before any error about rejected rows.
        max_rejected_share: of all rows; more is an error.

    Raises:
        DataError: no data, an unreadable file, or too many rejected rows.
    """
    expected = None if dataset.format in ("auto", "served") else dataset.format
    found: dict[str, Conversation] = {}
    report = _load(dataset, root, out, max_rejected_share, lambda row: parse_conversation(row, expected), found)
    return LoadedConversations(tuple(found.values()), report)


def load_tokens(
    dataset: DatasetSpec, root: Path, out: Path, max_rejected_share: float, vocab_size: int
) -> LoadedTokens:
    """Load a pre-tokenized data set; arguments and errors as `load_conversations`."""
    found: dict[str, TokenRow] = {}
    report = _load(dataset, root, out, max_rejected_share, lambda row: parse_tokens(row, vocab_size), found)
    return LoadedTokens(tuple(found.values()), report)


@dataclass
class _Tally:
    rows: int = 0
    duplicates: int = 0
    rejected: int = 0
    first: list[Rejection] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)

    def reject(self, rejection: Rejection) -> None:
        self.rejected += 1
        self.reasons[rejection.reason] += 1
        if len(self.first) < SHOWN_REJECTIONS:
            self.first.append(rejection)


def _load(
    dataset: DatasetSpec,
    root: Path,
    out: Path,
    max_rejected_share: float,
    parse: Callable[[Any], Item],
    found: dict[str, Item],
) -> LoadReport:
    """Fill `found` by id; of equal rows the first is kept."""
    paths = find_dataset_files(dataset, root)
    quarantine = out / QUARANTINE_FILE
    tally = _Tally()
    with publish_file(quarantine) as staging, staging.open("w", encoding="utf-8") as stream:
        for item in _parsed(paths, parse, tally.unread):
            tally.rows += 1
            if isinstance(item, Rejection):
                tally.reject(item)
                stream.write(item.to_json() + "\n")
            elif item.id in found:
                tally.duplicates += 1
            else:
                found[item.id] = item
    _check(dataset, paths, tally, max_rejected_share, quarantine)
    return LoadReport(
        len(paths), tally.rows, tally.rejected, tally.duplicates, quarantine, dict(sorted(tally.unread.items()))
    )


def _parsed(paths: list[Path], parse: Callable[[Any], Item], unread: Counter[str]) -> Iterator[Item | Rejection]:
    """Yield the rows as parsed, and count into `unread` the keys of the usable ones that are not read."""
    for path in paths:
        for row in read_rows(path):
            if isinstance(row, Rejection):
                yield row
                continue
            try:
                item = parse(row.value)
                unread.update(find_unread_keys(row.value))
                yield item
            except RowError as error:
                yield reject(row, str(error))
            except RecursionError:
                yield reject(row, "nested too deeply")


def _check(dataset: DatasetSpec, paths: list[Path], tally: _Tally, limit: float, quarantine: Path) -> None:
    where = f"data set {dataset.name}"
    if not tally.rows:
        raise DataError(f"{where}: its {len(paths)} file(s) hold no row, beginning with {paths[0]}")
    shown = "\n".join(f"  {rejection}" for rejection in tally.first)
    if tally.rejected > limit * tally.rows:
        raise DataError(
            f"{where}: {tally.rejected:,} of {tally.rows:,} rows rejected ({tally.rejected / tally.rows:.1%}),"
            f" max_rejected_share allows {limit:.1%}. {describe_commonest(tally.reasons)}. The first:\n{shown}\n"
            f"All of them are in {quarantine}: repair them, or raise max_rejected_share"
        )
    if tally.rejected == tally.rows:
        raise DataError(f"{where}: every one of its {tally.rows:,} rows was rejected. The first:\n{shown}")
