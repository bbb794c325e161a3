"""Loading a data set of the registry: rows are read, validated and deduplicated, bad rows quarantined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftworks.config.registry_files import DatasetSpec
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, Item
from draftworks.data.formats import RowError, detect_format, find_unread_keys, parse_conversation, parse_tokens
from draftworks.data.raw_rows import Rejection, read_rows, reject
from draftworks.data.rejected import describe_commonest
from draftworks.data.sources import find_dataset_files
from draftworks.data.tokenized import TokenRow
from draftworks.errors import DataError
from draftworks.storage.files import publish_file
from draftworks.storage.words import list_fitting

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
