"""The first rows of a data set, parsed as a run parses them, and the columns that its rows have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import Conversation, Scalar
from draftworks.data.datasets import detect_kind
from draftworks.data.formats import RowError, find_unread_keys, parse_conversation, parse_tokens, read_columns
from draftworks.data.raw_rows import RawRow, is_json_list, read_rows
from draftworks.data.served.loading import REJECTED, drop_beginnings, read_served
from draftworks.data.sources import SERVED, find_dataset_files
from draftworks.data.token_rows import TokenRow

SAMPLE_ROWS = 64
"""Number of data rows that are read from each data set."""
MAX_JSON_LIST_BYTES = 256 << 20
"""Largest JSON list in bytes; larger ones are skipped, as such a file has to be read whole for its first rows."""


@dataclass
class Sample:
    """The first data rows of a data set.

    Attributes:
        kind: "tokens" for tokenized data, as `detect_kind` returns it; empty if no file was looked at.
        items: parsed rows: token rows or conversations.
        reasons: for each rejected row, why it cannot be used.
        outside: how many of them are sound but for ids that the target's vocabulary does not have.
        skipped: files that were not looked at.
        whole: whether these are all rows of the data set.
        unread: keys of usable rows and their turns that are not read, each with the number of rows that have it.
    """

    kind: str
    items: list[Any] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    outside: int = 0
    skipped: list[Path] = field(default_factory=list)
    whole: bool = False
    unread: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        return len(self.items) + len(self.reasons)


def read_sample(dataset: DatasetSpec, root: Path, files: TargetFiles) -> Sample:
    """Return the first `SAMPLE_ROWS` data rows, from as many files as necessary.

    Raises:
        DataError: no file, an unreadable one, or no row whose format is recognised.
    """
    if dataset.format == SERVED:
        return _read_served_sample(dataset, root)
    paths = find_dataset_files(dataset, root)
    skipped = [path for path in paths if not _can_be_streamed(path)]
    if len(skipped) == len(paths):
        return Sample("", skipped=skipped)
    sample = Sample(detect_kind(dataset, root), skipped=skipped)
    expected = None if dataset.format == "auto" else dataset.format
    for path in (path for path in paths if path not in skipped):
        for row in islice(read_rows(path), SAMPLE_ROWS - sample.rows):
            if not isinstance(row, RawRow):
                sample.reasons.append(str(row))
                continue
            try:
                tokens = sample.kind == "tokens"
                sample.items.append(
                    parse_tokens(row.value, files.vocab_size) if tokens else parse_conversation(row.value, expected)
                )
                sample.unread.update(find_unread_keys(row.value))
            except (RowError, RecursionError) as error:
                sample.reasons.append(f"{row.file}:{row.line}: {error}")
                sample.outside += sample.kind == "tokens" and _is_sound(row.value)
        if sample.rows >= SAMPLE_ROWS:
            break
    sample.whole = sample.rows < SAMPLE_ROWS and not skipped
    return sample


def _is_sound(row: Any) -> bool:
    """Whether a row is tokenized rightly for some vocabulary."""
    with suppress(RowError, RecursionError):
        return bool(parse_tokens(row))
    return False


def read_usable(dataset: DatasetSpec, root: Path, kind: str) -> Iterator[Conversation | TokenRow]:
    """Yield the rows of a data set that can be used, whatever their ids are; of files that cannot be streamed, none.

    Raises:
        DataError: a file cannot be read to its end.
    """
    expected = None if dataset.format in ("auto", SERVED) else dataset.format
    for path in filter(_can_be_streamed, find_dataset_files(dataset, root)):
        for row in read_rows(path):
            with suppress(RowError, RecursionError):
                if isinstance(row, RawRow):
                    yield parse_tokens(row.value) if kind == "tokens" else parse_conversation(row.value, expected)


def _read_served_sample(dataset: DatasetSpec, root: Path) -> Sample:
    """Return the first rows of served prompts, redacted. Reasons do not quote a row."""
    sample, rows = Sample("conversations"), 0
    for row in read_served(dataset, root, SAMPLE_ROWS):
        rows += 1
        if row.conversation is not None:
            sample.items.append(row.conversation)
        elif row.outcome == REJECTED:
            sample.reasons.append(f"{row.file}:{row.line}: {row.reason}")
    sample.items, sample.whole = drop_beginnings(sample.items), rows < SAMPLE_ROWS
    return sample


def find_absent_columns(columns: Collection[str], dataset: DatasetSpec, root: Path) -> set[str]:
    """Return the columns that no row of a data set has. Reads until each was seen: the whole data set for a wrong name.

    Raises:
        DataError: a file cannot be read to its end.
    """
    return _find_absent(columns, dataset, root, lambda found: found.keys())


def find_absent_values(column: str, values: Collection[str], dataset: DatasetSpec, root: Path) -> set[str]:
    """Return the values of a column, as text, that no row of a data set has. Reads and raises as `find_absent_columns`."""
    return _find_absent(values, dataset, root, lambda found: {str(found[column])} if column in found else ())


def _find_absent(
    wanted: Collection[str], dataset: DatasetSpec, root: Path, select: Callable[[Mapping[str, Scalar]], Iterable[str]]
) -> set[str]:
    left = set(wanted)
    for path in find_dataset_files(dataset, root):
        if not _can_be_streamed(path):
            return set()  # not known, and no reason to refuse
        for row in read_rows(path):
            if isinstance(row, RawRow) and isinstance(row.value, dict):
                left.difference_update(select(read_columns(row.value)))
            if not left:
                return left
    return left


def _can_be_streamed(path: Path) -> bool:
    return path.suffix.lower() != ".json" or path.stat().st_size <= MAX_JSON_LIST_BYTES or not is_json_list(path)
