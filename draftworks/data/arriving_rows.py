"""Conversations of a source that has no end yet: the lines of growing files, or a Python iterator of an installed package."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftworks.config.data import ServedSpec
from draftworks.config.registry_files import DatasetSpec
from draftworks.data.conversations import Conversation
from draftworks.data.datasets import Rejection, decode_line
from draftworks.data.formats import RowError, parse_conversation
from draftworks.data.growing_files import GrowingFiles, Line, find_source
from draftworks.data.served.loading import REJECTED, SECRET, read_served
from draftworks.data.sources import SERVED
from draftworks.errors import ConfigError, DataError

PATIENCE_S = 1.0
"""How long rows of an iterator are gathered before they are taken."""


@dataclass(frozen=True)
class ArrivedRows:
    """Rows that have come: how many were read, the usable conversations among them, and why others are not."""

    rows: int
    conversations: Sequence[Conversation]
    reasons: Sequence[str] = ()


class RowReader(ABC):
    """A source, read forwards.

    Attributes:
        is_over: whether nothing more will come.
    """

    is_over: bool = False

    @abstractmethod
    def read(self, count: int) -> ArrivedRows:
        """Return the next rows, at most `count`; none if none are there. Raises DataError if the source is broken."""

    @abstractmethod
    def get_state(self) -> str | None:
        """Return, as JSON, what a reader that is opened with it goes on after; None if the source has no such state."""


class DatasetReader(RowReader):
    """The lines of a data set whose files grow, in its format.

    Args:
        to_end: read what is there now, and end.
    """

    def __init__(self, spec: DatasetSpec, root: Path, state: str | None, to_end: bool) -> None:
        self._spec = spec
        self._root = root
        self._files = GrowingFiles(spec, root, None if state is None else json.loads(state), to_end)
        self._to_end = to_end

    def read(self, count: int) -> ArrivedRows:
        lines = self._files.read(count)
        self.is_over = self._to_end and not lines
        return self._read_served(lines) if self._spec.format == SERVED else _parse(_decode(lines), self._spec)

    def get_state(self) -> str:
        return json.dumps(self._files.state)

    def _read_served(self, lines: Sequence[Line]) -> ArrivedRows:
        found = list(read_served(self._spec, self._root, arrived=lines)) if lines else []
        for row in found:
            if row.outcome == SECRET and (self._spec.served or ServedSpec()).on_secret == "refuse":
                raise DataError(
                    f"data set {self._spec.name}: {row.file}:{row.line}: the row still holds a secret, {row.reason}, after "
                    "redaction (on_secret: refuse). Extend the redaction, or set on_secret: drop"
                )
        reasons = [row.reason for row in found if row.outcome in (REJECTED, SECRET)]
        return ArrivedRows(len(lines), [row.conversation for row in found if row.conversation is not None], reasons)


class IteratorReader(RowReader):
    """The rows of an iterator. Where it has `state()` and `restore(state)`, a reader may go on after another one.

    Raises:
        ConfigError: there is no such entry point, or it cannot go on.
    """

    def __init__(self, name: str, state: str | None, is_new: bool) -> None:
        rows = find_source(name).load()()
        if not is_new:
            if state is None or not hasattr(rows, "restore"):
                raise ConfigError(
                    f"streaming.source {name}: expected methods state() and restore(state), found none, and its training was "
                    "interrupted: its rows cannot be told from those that were taken. Add them, or start over"
                )
            rows.restore(json.loads(state))
        self._name = name
        self._source = rows
        self._rows: Iterator[Any] = iter(rows)

    def read(self, count: int) -> ArrivedRows:
        until = time.monotonic() + PATIENCE_S
        found: list[Any] = []
        for row in islice(self._rows, count):
            found.append(row)
            if time.monotonic() > until:
                break
        else:
            self.is_over = len(found) < count
        return _parse(found, None)

    def get_state(self) -> str | None:
        return json.dumps(self._source.state()) if hasattr(self._source, "state") else None


def _decode(lines: Sequence[Line]) -> list[Any]:
    rows = (decode_line(each.content, each.file, each.number) for each in lines)
    return [row if isinstance(row, Rejection) else row.value for row in rows]


def _parse(rows: Sequence[Any], spec: DatasetSpec | None) -> ArrivedRows:
    expected = None if spec is None or spec.format in ("auto", "served") else spec.format
    found: list[Conversation] = []
    reasons: list[str] = []
    for row in rows:
        if isinstance(row, Rejection):
            reasons.append(row.reason)
            continue
        try:
            found.append(parse_conversation(row, expected))
        except (RowError, RecursionError) as error:
            reasons.append(str(error) or "nested too deeply")
    return ArrivedRows(len(rows), found, reasons)
