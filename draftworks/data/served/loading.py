"""Loading served prompts: logged rows are read in bounds, masked, redacted, searched for secrets, and become conversations.

No answer of a server is kept: the target answers the prompts again. Nothing here writes or says a word of a row; what
cannot be used is recorded by file, line and a fixed reason.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from draftworks.config.data import ServedSpec
from draftworks.config.registry_files import DatasetSpec
from draftworks.data.conversations import ANSWER, QUARANTINE_FILE, Conversation, Turn, digest_turns
from draftworks.data.datasets import Rejection
from draftworks.data.growing_files import Line
from draftworks.data.served.redaction import HookRow, redact_rows
from draftworks.data.served.secrets import REVISION, digest_hook, find_secret, mask_text
from draftworks.data.served.shapes import ServedPrompt, ShapeError, parse_served
from draftworks.data.slices import SOURCE, THINKING, add_slice_columns
from draftworks.data.sources import find_dataset_files
from draftworks.errors import DataError
from draftworks.storage.files import open_regular, parse_json, publish_file
from draftworks.storage.identity import FileDigests

SHOWN_REJECTIONS = 3
MAX_BATCH_BYTES = 32 << 20
MAX_LISTED_FILES = 100
KEPT, REJECTED, SECRET, HOOK, OTHER_EVENT = "kept", "rejected", "secret", "dropped_by_redaction", "other_event"
_LOG_PREFIX = re.compile(rb"\s*\[\d[^\]]{0,60}\]\s+(?=\{)")
"""What Python's logging, as SGLang sets it up, writes before a line: `[2026-01-31 12:00:00] `."""


@dataclass(frozen=True)
class ServedRow:
    """A row of a log with what became of it.

    Attributes:
        outcome: kept, rejected, secret, dropped_by_redaction or other_event.
        reason: of a rejection, or the kind of secret.
        conversation: of a kept row.
        created: seconds since the epoch; None if not known.
        masked: kinds of what was replaced in it before the redaction.
    """

    file: str
    line: int
    outcome: str
    reason: str = ""
    conversation: Conversation | None = None
    created: float | None = None
    masked: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LoadedPrompts:
    """The distinct served prompts of a data set, in the order of its files, and where they come from.

    Attributes:
        counts: of rows, by what became of them.
        lineage: files with digests, time span, what redaction was, counts, and rows by the kind that was masked in them
            or for which they were left out; without a word of a row.
    """

    conversations: tuple[Conversation, ...]
    counts: dict[str, int]
    lineage: dict[str, Any]


@dataclass
class _Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    rows: int = 0
    duplicates: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, row: ServedRow) -> None:
        self.rows += 1
        self.outcomes[row.outcome] += 1
        self.masked.update(row.masked)
        if row.outcome == SECRET:
            self.left_out[row.reason] += 1
        if row.outcome == REJECTED and len(self.first) < SHOWN_REJECTIONS:
            self.first.append(f"  {row.file}:{row.line}: {row.reason}")
        if row.outcome == KEPT and row.created is not None:
            self.oldest = row.created if self.oldest is None else min(self.oldest, row.created)
            self.newest = row.created if self.newest is None else max(self.newest, row.created)


def load_served(dataset: DatasetSpec, root: Path, out: Path, max_rejected_share: float) -> LoadedPrompts:
    """Load a data set of served prompts; write `quarantine.jsonl` without excerpts into `out`.

    A conversation whose turns are the beginning of a longer one is left out: a chat is logged again with every message.

    Raises:
        DataError: no data, too many rows or rejected ones, a failed hook, or a secret where `on_secret` is refuse.
    """
    spec = dataset.served or ServedSpec()
    where = f"data set {dataset.name}"
    paths = find_dataset_files(dataset, root)
    tally, found = _Tally(), dict[str, Conversation]()
    with publish_file(out / QUARANTINE_FILE) as staging, staging.open("w", encoding="utf-8") as stream:
        for row in read_served(dataset, root):
            tally.add(row)
            if tally.rows > spec.max_rows:
                raise DataError(
                    f"{where}: more than {spec.max_rows:,} rows: raise served.max_rows, or take fewer files"
                )
            if row.outcome == SECRET and spec.on_secret == "refuse":
                raise DataError(
                    f"{where}: {row.file}:{row.line}: the row still holds a secret, {row.reason}, after redaction (on_secret: "
                    "refuse). Extend the redaction, or set on_secret: drop"
                )
            if row.outcome in (REJECTED, SECRET):
                reason = row.reason if row.outcome == REJECTED else f"a secret: {row.reason}"
                stream.write(Rejection(row.file, row.line, reason, "").to_json() + "\n")
            if row.conversation is not None:
                tally.duplicates += row.conversation.id in found
                found.setdefault(row.conversation.id, row.conversation)
    _require_usable(where, tally, max_rejected_share)
    kept = drop_beginnings(found.values())
    counts = _count(tally, len(paths), len(found) - len(kept))
    return LoadedPrompts(tuple(kept), counts, _describe_lineage(spec, root, paths, tally, counts))


def read_served(
    dataset: DatasetSpec, root: Path, limit: int | None = None, arrived: Sequence[Line] | None = None
) -> Iterator[ServedRow]:
    """Yield the rows of a data set of served prompts, at most `limit`, in the order of its files.

    Args:
        arrived: lines to read instead of the files.

    Raises:
        DataError: an unreadable file, or a failed hook.
    """
    spec = dataset.served or ServedSpec()
    lines: Iterable[LogLine] = (LogLine(each.file, each.number, _cut_prefix(each.content)) for each in arrived or ())
    if arrived is None:
        lines = (line for path in find_dataset_files(dataset, root) for line in read_lines(path, spec.max_line_mb))
    parsed = (_parse(line, spec) for line in islice(lines, limit))
    calls = 1000 if spec.redaction is None else spec.redaction.rows_per_call
    for batch in _batches(parsed, calls):
        yield from _redact(batch, spec, dataset.name, root)


@dataclass(frozen=True)
class PromptSample:
    """What the first bytes of a log hold.

    Attributes:
        prompts: distinct ones that are the beginning of no other, before any redaction.
        characters, answers: of these prompts; the turns that a target answers, the last one included.
        nbytes: of the lines that were read.
        complete: whether these are all lines.
    """

    prompts: int
    characters: int
    answers: int
    nbytes: int
    complete: bool


def sample_prompts(dataset: DatasetSpec, root: Path, max_bytes: int) -> PromptSample:
    """Count the prompts in the first lines of a data set of served prompts; nothing is masked, and no hook is run.

    Raises:
        DataError: no file, or an unreadable one.
    """
    spec = dataset.served or ServedSpec()
    found: dict[str, Conversation] = {}
    nbytes, complete = 0, True
    for line in (line for path in find_dataset_files(dataset, root) for line in read_lines(path, spec.max_line_mb)):
        if nbytes >= max_bytes:
            complete = False
            break
        nbytes += len(line.content) or int(spec.max_line_mb * 2**20)
        prompt = _parse(line, spec).prompt
        if prompt is not None:
            conversation = Conversation.of([*prompt.turns, ANSWER])
            found[conversation.id] = conversation
    kept = drop_beginnings(found.values())
    turns = [turn for one in kept for turn in one.turns]
    asked = sum(len(turn.content) for turn in turns if turn.role != "assistant")
    return PromptSample(len(kept), asked, sum(turn.role == "assistant" for turn in turns), nbytes, complete)


def drop_beginnings(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Return the conversations that are not the beginning of another one."""
    conversations = list(conversations)
    continued: set[str] = set()
    for one in conversations:
        asked = [turn for turn in one.turns[:-1] if turn.role != "assistant"]
        continued.update(digest_turns(asked[:end]) for end in range(1, len(asked)))
    return [
        one
        for one in conversations
        if digest_turns(t for t in one.turns[:-1] if t.role != "assistant") not in continued
    ]


@dataclass(frozen=True)
class LogLine:
    """A line of a file: its bytes, or why they cannot be used."""

    file: str
    number: int
    content: bytes = b""
    problem: str = ""


@dataclass(frozen=True)
class _Parsed:
    line: LogLine
    prompt: ServedPrompt | None = None
    problem: str = ""

    @property
    def size(self) -> int:
        return 0 if self.prompt is None else sum(len(turn.content) for turn in self.prompt.turns)


def read_lines(path: Path, max_line_mb: float) -> Iterator[LogLine]:
    """Yield the lines of a log that are not empty, without what a logger wrote before them; one that is too long is never
    held. Raises DataError if the file cannot be read."""
    limit = int(max_line_mb * 2**20)
    try:
        with open_regular(path) as stream:
            number = 0
            while raw := stream.readline(limit + 1):
                number += 1
                if len(raw) > limit and not raw.endswith(b"\n"):
                    while (rest := stream.readline(limit)) and not rest.endswith(b"\n"):
                        pass
                    yield LogLine(str(path), number, problem=f"a line longer than {max_line_mb:g} MiB")
                    continue
                raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if raw.strip():
                    yield LogLine(str(path), number, _cut_prefix(raw))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _cut_prefix(raw: bytes) -> bytes:
    return raw if raw.startswith(b"{") else _LOG_PREFIX.sub(b"", raw, count=1)


def _parse(line: LogLine, spec: ServedSpec) -> _Parsed:
    if line.problem:
        return _Parsed(line, problem=line.problem)
    bare = replace(line, content=b"")
    try:
        return _Parsed(bare, parse_served(parse_json(line.content.decode("utf-8")), spec.source_field))
    except ShapeError as error:
        return _Parsed(bare, problem=str(error))
    except (ValueError, RecursionError):
        return _Parsed(bare, problem="not a line of JSON in UTF-8")


def _batches(rows: Iterable[_Parsed], most: int) -> Iterator[list[_Parsed]]:
    batch: list[_Parsed] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.size
        if len(batch) >= most or size >= MAX_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _redact(batch: list[_Parsed], spec: ServedSpec, name: str, root: Path) -> Iterator[ServedRow]:
    masked = [_mask(row.prompt, spec, name) for row in batch if row.prompt is not None]
    rows = [one.row for one in masked]
    where = f"data set {name}"
    redacted = iter(zip(masked, rows if spec.redaction is None else redact_rows(rows, spec.redaction, root, where)))
    for row in batch:
        file, number = row.line.file, row.line.number
        if row.prompt is None:
            yield ServedRow(file, number, REJECTED if row.problem else OTHER_EVENT, row.problem)
            continue
        before, clean = next(redacted)
        if clean is None:
            yield ServedRow(file, number, HOOK, masked=before.kinds)
            continue
        secret = find_secret([*(turn.content for turn in clean.turns), clean.source])
        if secret is not None:
            yield ServedRow(file, number, SECRET, secret, masked=before.kinds)
            continue
        columns = {THINKING: row.prompt.thinking, SOURCE: clean.source}
        conversation = add_slice_columns(Conversation.of([*clean.turns, ANSWER], columns), name)
        yield ServedRow(file, number, KEPT, "", conversation, row.prompt.created, before.kinds)


@dataclass(frozen=True)
class _Masked:
    row: HookRow
    kinds: frozenset[str]


def _mask(prompt: ServedPrompt, spec: ServedSpec, name: str) -> _Masked:
    texts = [mask_text(turn.content, spec.mask) for turn in prompt.turns]
    source = mask_text(prompt.source or name, spec.mask)
    turns = tuple(Turn(turn.role, masked.text) for turn, masked in zip(prompt.turns, texts))
    return _Masked(HookRow(turns, source.text), source.kinds.union(*(one.kinds for one in texts)))


def _require_usable(where: str, tally: _Tally, max_rejected_share: float) -> None:
    requests = tally.rows - tally.outcomes[OTHER_EVENT]
    rejected, shown = tally.outcomes[REJECTED], "\n".join(tally.first)
    if not requests:
        raise DataError(f"{where}: its files hold no logged request")
    if rejected > max_rejected_share * requests:
        raise DataError(
            f"{where}: {rejected:,} of {requests:,} rows rejected ({rejected / requests:.1%}), max_rejected_share allows "
            f"{max_rejected_share:.1%}. The first:\n{shown}"
        )
    if not tally.outcomes[KEPT]:
        secrets, dropped = tally.outcomes[SECRET], tally.outcomes[HOOK]
        raise DataError(
            f"{where}: no row is left of {requests:,}: {rejected:,} rejected, {secrets:,} with a secret, {dropped:,} dropped "
            f"by the redaction{'. The first rejected:' if shown else ''}\n{shown}".rstrip()
        )


def _count(tally: _Tally, files: int, superseded: int) -> dict[str, int]:
    return {
        "files": files,
        "rows": tally.rows,
        "rejected": tally.outcomes[REJECTED],
        "duplicates": tally.duplicates,
        "superseded": superseded,
        "other_events": tally.outcomes[OTHER_EVENT],
        "dropped_for_secrets": tally.outcomes[SECRET],
        "dropped_by_redaction": tally.outcomes[HOOK],
    }


def _describe_lineage(
    spec: ServedSpec, root: Path, paths: list[Path], tally: _Tally, counts: dict[str, int]
) -> dict[str, Any]:
    digests = FileDigests()
    files = {os.path.relpath(path, root): digests.of_file(path) for path in paths[:MAX_LISTED_FILES]}
    return {
        "files": files,
        "files_not_listed": max(0, len(paths) - MAX_LISTED_FILES),
        "from": _format_time(tally.oldest),
        "to": _format_time(tally.newest),
        "mask": sorted(set(spec.mask)),
        "redaction": digest_hook(spec.redaction, root, digests),
        "secret_patterns": REVISION,
        "masked": dict(sorted(tally.masked.items())),
        "left_out": dict(sorted(tally.left_out.items())),
        "counts": counts,
    }


def _format_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
