"""Logs of served requests, read in one bounded pass into columns of numbers; what cannot be used is counted by its reason.

A line is one of ours (the recording proxy), one of a gateway that holds request and response, or `request.finished` of
SGLang's JSON log. Nothing of a prompt is kept.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftworks.config.observation import RequestsSpec
from draftworks.data.served.loading import LogLine, read_lines
from draftworks.data.served.shapes import find_body, find_created
from draftworks.data.slices import LANGUAGE, PROMPT_LENGTH, SOURCE, THINKING, THINKING_UNKNOWN, name_prompt_length
from draftworks.data.sources import find_files
from draftworks.errors import DataError, StoreError
from draftworks.production.asked import read_asked
from draftworks.production.observer import CLOCK_TOLERANCE_S
from draftworks.production.requests import ABORT, MARK, ServedRequest, detect_engine, read_answer
from draftworks.storage.files import open_regular, parse_json

FINISHED = "request.finished"
"""Event of SGLang's JSON log that has a request with its answer and counts."""
OURS = f'{{"{MARK}":'.encode()
"""How a line of ours begins, unless somebody wrote it again."""
MAX_LINE_MB = 16.0
CHUNK = 1 << 22
NOT_NAMED = "not named"
"""Server of a gateway's line that does not say which one answered."""

HALF = "no JSON, such as half a line"
TOO_LONG = f"longer than {MAX_LINE_MB:g} MiB"
OTHER_SCHEMA = "of another version of the format"
NO_ANSWER = "without request or answer"
NO_TIME = "without a time"
OTHER_MODEL = "of another model"
AHEAD = "of a clock that is ahead of this machine's"
ABORTED = "aborted"
SEVERAL = "of several answers (n > 1)"
LOSSY = "by a rule of acceptance that changes the output"
NO_COUNTS = "without counts of speculative decoding"
CONTRADICTORY = "with counts that contradict each other"
NOTHING_VERIFIED = "that ended with the first token: nothing to verify"
OTHER_SERVER = "of a server whose strategy is not known"
REPEATED = "logged before"
OTHER_DRAFT = "of a former draft"
OTHER_WEIGHTS = "of former weights of the target"

TURN, TEMPERATURE, SERVER = "turn", "temperature", "server"
COLUMNS = (SOURCE, LANGUAGE, PROMPT_LENGTH, THINKING, TURN, TEMPERATURE, SERVER)
NONE = "(none)"
MOST_VALUES = 1000
REST = "(other)"
"""Value of a column beyond the first MOST_VALUES of it."""


class NotUsed(ValueError):
    """The reason, without a word of the line, for which a line is counted apart."""


@dataclass
class Codes:
    """Numbers for the values of a column, in the order in which they came."""

    most: int = MOST_VALUES
    numbers: dict[str, int] = field(default_factory=dict)

    def encode(self, value: str) -> int:
        found = self.numbers.get(value)
        if found is not None:
            return found
        value = value if len(self.numbers) < self.most else REST
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[str]:
        return list(self.numbers)


@dataclass(frozen=True)
class RequestTable:
    """The requests of a log that can be compared, (requests,) each.

    Attributes:
        time: seconds since the epoch.
        passes, accepted: accepted tokens are those of the answer, see `ServedRequest.accepted_in_answer`.
        drafted, emitted: -1 where it is not known; emitted tokens are those after the first one.
        prompt: first 8 bytes of the digest of what was asked; 0 without one.
        draft, weights: codes of draft, and of server with weight version.
        columns: codes by column.
    """

    time: np.ndarray
    passes: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    emitted: np.ndarray
    prompt: np.ndarray
    draft: np.ndarray
    weights: np.ndarray
    columns: Mapping[str, np.ndarray]
    values: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return len(self.time)

    def select(self, chosen: np.ndarray) -> RequestTable:
        """Return the requests at which `chosen`, bool (requests,), is true."""
        plain = {name: getattr(self, name)[chosen] for name in _NUMBERS}
        return RequestTable(
            **plain, columns={name: each[chosen] for name, each in self.columns.items()}, values=self.values
        )

    def find(self, column: str, value: str) -> np.ndarray:
        """Return at which requests a column has a value, bool (requests,)."""
        values = list(self.values[column])
        return self.columns[column] == (values.index(value) if value in values else -1)


_NUMBERS = {
    "time": "d",
    **dict.fromkeys(("passes", "accepted", "drafted", "emitted"), "q"),
    "prompt": "Q",
    **dict.fromkeys(("draft", "weights"), "l"),
}
"""Columns of numbers in the order in which a row has them, with their types in an array."""


class _Builder:
    """Collects the requests of a log."""

    def __init__(self) -> None:
        self._numbers = {name: array(kind) for name, kind in _NUMBERS.items()}
        self._columns = {name: array("l") for name in COLUMNS}
        self._codes = {name: Codes() for name in COLUMNS}
        self.drafts, self.weights = Codes(2**31), Codes(2**31)

    def add(self, request: ServedRequest, draft: str) -> None:
        emitted, drafted = request.completion_tokens, request.drafted
        row = (
            request.time,
            request.passes,
            request.accepted_in_answer,
            -1 if drafted is None else drafted,
            -1 if emitted is None else max(emitted - 1, 0),
            shorten(request.prompt),
            self.drafts.encode(draft),
            self.weights.encode(f"{request.server}\n{request.weight_version or ''}"),
        )
        for column, value in zip(self._numbers.values(), row, strict=True):
            column.append(value)
        for name, value in describe_slices(request).items():
            self._columns[name].append(self._codes[name].encode(value))

    def build(self) -> RequestTable:
        numbers = {name: np.array(each, dtype=each.typecode) for name, each in self._numbers.items()}
        columns = {name: np.array(each, dtype=np.int64) for name, each in self._columns.items()}
        values = {name: each.values for name, each in self._codes.items()}
        return RequestTable(
            **numbers, columns=columns, values={**values, "draft": self.drafts.values, "weights": self.weights.values}
        )


def shorten(prompt: str | None) -> int:
    """Return the first 8 bytes of a digest as a number; 0 for none, or for what is no digest."""
    try:
        return int(prompt[:16], 16) if prompt else 0
    except ValueError:
        return 0


def describe_slices(request: ServedRequest) -> dict[str, str]:
    """Return the values of the columns of a request, as reports name them."""
    thinking, turn, characters = request.thinking, request.turn, request.prompt_characters
    return {
        SOURCE: request.source or NONE,
        LANGUAGE: request.language or NONE,
        PROMPT_LENGTH: NONE if characters is None else name_prompt_length(characters),
        THINKING: THINKING_UNKNOWN if thinking is None else "on" if thinking else "off",
        TURN: NONE if turn is None else "3 or later" if turn >= 3 else str(turn),
        TEMPERATURE: NONE if request.temperature is None else "above 0" if request.temperature else "0",
        SERVER: request.server,
    }


@dataclass(frozen=True)
class ServedBy:
    """The strategy and the draft that answered a request, the draft by its digest where it was in service here."""

    strategy: str
    draft: str


@dataclass(frozen=True)
class LogReading:
    """What one pass over the logs of a target found.

    Attributes:
        requests: by strategy.
        files: number of files.
        lines: that were read; each is in `requests`, or in `apart` by the reason for which it is not.
        skipped: older lines, which were not read.
        remarks: what a reader of the figures has to know.
    """

    requests: Mapping[str, RequestTable]
    files: int
    lines: int
    skipped: int
    apart: Mapping[str, int]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RequestLog:
    """The logs of one target.

    Attributes:
        root: the registry's folder.
        models: names and paths by which an answer may call the target.
        find_draft: returns what answered a request; None if the server's strategy is not known.
    """

    spec: RequestsSpec
    root: Path
    models: Sequence[str]
    find_draft: Callable[[ServedRequest], ServedBy | None]
    clock: Callable[[], float] = time.time

    def read(self) -> LogReading:
        """Read the last lines of all files.

        Raises:
            DataError: a file cannot be read.
        """
        builders, apart, seen = defaultdict[str, _Builder](_Builder), Counter[str](), set[int]()
        paths, remarks = self._find_files()
        lines, skipped = 0, 0
        for path, first in self._choose_lines(paths):
            skipped += first
            for line in read_lines(path, MAX_LINE_MB):
                if line.number <= first:
                    continue
                lines += 1
                reason = self._take(line, builders, seen)
                if reason is not None:
                    apart[reason] += 1
        tables = {name: each.build() for name, each in sorted(builders.items())}
        return LogReading(tables, len(paths), lines, skipped, dict(apart), tuple(remarks))

    def _take(self, line: LogLine, builders: dict[str, _Builder], seen: set[int]) -> str | None:
        """Add the request of a line; return the reason if it cannot be compared."""
        try:
            request = parse_line(line, self.spec.source_field)
            self._require_comparable(request)
        except NotUsed as error:
            return str(error)
        served_by = self.find_draft(request)
        if served_by is None:
            return OTHER_SERVER
        name = hash((request.server, request.id))
        if name in seen:
            return REPEATED
        seen.add(name)
        builders[served_by.strategy].add(request, served_by.draft)
        return None

    def _require_comparable(self, request: ServedRequest) -> None:
        """Raise NotUsed for a request that tells nothing of a draft's acceptance, by the first reason."""
        if request.model is not None and request.model.rstrip("/") not in self.models:
            raise NotUsed(OTHER_MODEL)
        if request.time > self.clock() + CLOCK_TOLERANCE_S:
            raise NotUsed(AHEAD)
        if request.finish in (ABORT, "error"):
            raise NotUsed(ABORTED)
        if request.answers != 1:
            raise NotUsed(SEVERAL)
        if request.lossy:
            raise NotUsed(LOSSY)
        if request.passes is None or request.accepted is None:
            raise NotUsed(NOTHING_VERIFIED if request.completion_tokens in (0, 1) else NO_COUNTS)
        if not request.passes:
            raise NotUsed(CONTRADICTORY if request.accepted else NOTHING_VERIFIED)

    def _find_files(self) -> tuple[list[Path], list[str]]:
        """Return the files, those that were written last at the end, and patterns that match none."""
        found, remarks = dict[Path, None](), []
        for pattern in self.spec.files:
            try:
                found |= dict.fromkeys(find_files([pattern], self.root, any_suffix=True))
            except DataError:
                remarks.append(f"no file matches {pattern!r} below {self.root} yet")
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path)), remarks

    def _choose_lines(self, paths: Sequence[Path]) -> Iterator[tuple[Path, int]]:
        """Yield each file with the number of its first lines to leave out, so that at most `max_lines` are left of all."""
        left, chosen = self.spec.max_lines, list[tuple[Path, int]]()
        for path in reversed(paths):
            count = count_lines(path)
            chosen.append((path, max(count - left, 0)))
            left = max(left - count, 0)
        return reversed(chosen)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file. Raises DataError if it cannot be read."""
    try:
        with open_regular(path) as stream:
            total, last = 0, b"\n"
            while chunk := stream.read(CHUNK):
                total, last = total + chunk.count(b"\n"), chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return total + (not last.endswith(b"\n"))


def parse_line(line: LogLine, source_field: str | None = None) -> ServedRequest:
    """Return the request of a line of a log.

    Raises:
        NotUsed: it holds none.
    """
    if line.problem:
        raise NotUsed(TOO_LONG)
    if line.content.startswith(OURS):
        try:
            return ServedRequest.from_line(line.content)
        except StoreError:
            pass  # why, is told below
    try:
        row = parse_json(line.content)
    except ValueError:
        raise NotUsed(HALF) from None
    if isinstance(row, dict) and MARK in row:
        try:
            return ServedRequest.from_json(row)
        except StoreError:
            raise NotUsed(OTHER_SCHEMA) from None
    if not isinstance(row, dict):
        raise NotUsed(NO_ANSWER)
    return _read_logged(row, f"{line.file}:{line.number}", source_field)


def _read_logged(row: Mapping[str, Any], name: str, source_field: str | None) -> ServedRequest:
    """Return the request of a line that holds it with its answer."""
    if row.get("event") == FINISHED:
        body, answer = row.get("obj"), row.get("out")
    else:
        body, answer = find_body(row), _find_answer(row)
    chunks = answer if isinstance(answer, list) else [answer]
    objects = [each for each in chunks if isinstance(each, Mapping)]
    if not isinstance(body, Mapping) or not objects:
        raise NotUsed(NO_ANSWER)
    asked = read_asked(body, row, source_field)
    engine = next(filter(None, map(detect_engine, objects)), None)
    found = read_answer(engine, objects)
    if found.problem is not None:
        raise NotUsed(CONTRADICTORY)
    when = find_created(row) or next(filter(None, map(find_created, objects)), None)
    if when is None:
        raise NotUsed(NO_TIME)
    server = row.get("server")
    counts = {} if found.counts is None else vars(found.counts)
    return ServedRequest(
        id=found.id or name,
        time=when,
        server=server if isinstance(server, str) and server else NOT_NAMED,
        engine=engine or NOT_NAMED,
        model=found.model,
        weight_version=found.weight_version,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        finish=found.finish,
        **{**vars(asked), "answers": max(asked.answers, found.answers)},
        **counts,
    )


def _find_answer(row: Mapping[str, Any]) -> Any:
    """Return the answer beside a request: an object, or the objects of a stream."""
    answer = row.get("response")
    if isinstance(answer, Mapping):
        return answer["body"] if isinstance(answer.get("body"), (Mapping, list)) else answer
    return answer if isinstance(answer, list) else row if "choices" in row else None
