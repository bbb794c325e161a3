"""Events, and a channel's log of events to tell; durable, whole after a kill at any moment.

    {var}/notifications/{channel}/outbox.jsonl   the channel's events and messages, see `Outbox`
    {var}/notifications/{channel}/.lock/         the lease of the process that sends

A message is written down before it is sent, and marked as told by one line afterwards. A process that is killed between
the two sends the same message again, with the same key; otherwise every event is told exactly once.

The bookmark names the newest records and runs that a tick has looked through, so that the next one reads only newer ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.event_log import append_lines, read_lines, write_lines
from draftworks.storage.files import parse_json, publish_json, read_json, remove
from draftworks.storage.identity import digest
from draftworks.storage.names import require_name

TEST = "test"
MAX_TITLE, MAX_TEXT = 200, 1500


@dataclass(frozen=True)
class Event:
    """Something that people are told of, once.

    Attributes:
        id: digest of kind, target and what the event is about, such as a run or the number of a record.
        kind: one of `draftworks.config.operations.EVENT_KINDS`, or `test`.
        target: name of the target; empty if it is of none.
        title: one line.
        text: more lines; may be empty.
        when: ISO 8601 with time zone.
        link: address of a page about it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    kind: str
    target: str
    title: str
    text: str
    when: str
    link: str | None = None

    @classmethod
    def make(
        cls,
        kind: str,
        target: str,
        subject: object,
        title: str,
        text: str = "",
        when: str = "",
        link: str | None = None,
    ) -> Event:
        """Return an event; long texts are cut, and `when` is now by default."""
        lines = " ".join(title.split())
        return cls(
            digest([kind, target, subject]),
            kind,
            target,
            _cut(lines, MAX_TITLE),
            _cut(text.strip(), MAX_TEXT),
            when or datetime.now(UTC).isoformat(timespec="seconds"),
            link,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any, where: str) -> Event:
        """Return the event in a file's JSON. Raises StoreError if it is none."""
        try:
            return _ADAPTER.validate_json(json.dumps(values), strict=True)
        except (ValidationError, TypeError, ValueError, RecursionError):
            raise StoreError(f"{where}: not an event. Remove the file") from None


_ADAPTER = TypeAdapter(Event)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


FOLDER = "notifications"
LOG, LOCK = "outbox.jsonl", ".lock"
MAX_EVENTS = 1000
"""Events of one message."""
SENT_DAYS = 30.0
"""How long it is remembered that an event was told. What looks for events never goes back so far."""


@dataclass(frozen=True)
class Message:
    """A message on its way.

    Attributes:
        events: what it tells; the same in every attempt.
        attempts: that failed.
        not_before: Unix time of the next attempt.
        began: Unix time at which it was made.
        problem: why the last attempt failed.
    """

    events: tuple[Event, ...]
    attempts: int = 0
    not_before: float = 0.0
    began: float = 0.0
    problem: str = ""

    @property
    def key(self) -> str:
        """The idempotency key: the same for the same events."""
        return digest(sorted(each.id for each in self.events))


@dataclass
class _Contents:
    """The state of an outbox after its lines. `ended` are the lines of messages that were told or refused."""

    pending: dict[str, Event] = field(default_factory=dict)
    message: Message | None = None
    ended: list[dict[str, Any]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def apply(self, line: dict[str, Any], where: str) -> None:
        """Apply one more line. Raises an error of any kind for a damaged one."""
        if "add" in line:
            event = Event.from_json(line["add"], where)
            self.pending[event.id] = event
            self.known.add(event.id)
        elif "begin" in line:
            self.message = Message(tuple(self.pending[each] for each in line["begin"]), began=float(line["at"]))
        elif "failed" in line and self.message is not None:
            later, problem = float(line["at"]), str(line["problem"])
            self.message = replace(self.message, attempts=int(line["failed"]), not_before=later, problem=problem)
        else:
            ids = line["told"] if "told" in line else [each["id"] for each in line["refused"]]
            self.known.update(ids)
            self.ended.append({**line, "at": float(line["at"])})
            self.message = None
            for each in ids:
                self.pending.pop(each, None)


@dataclass(frozen=True)
class Outbox:
    """The outbox of one channel. Whoever writes holds its lock.

    A line of its log has one of these keys, and `at`, a Unix time, beside it:

        add       an event that is to be told
        begin     ids of the events of the message that is sent next
        failed    attempts of that message so far, with the time of the next one, and why the last one failed
        told      ids of its events: it has arrived
        refused   its events: the server does not take them
    """

    var: Path
    channel: str

    @property
    def folder(self) -> Path:
        return self.var / FOLDER / require_name(self.channel)

    @property
    def path(self) -> Path:
        return self.folder / LOG

    @property
    def lock(self) -> Path:
        """The lock's folder, whose parent is made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / LOCK

    def add(self, events: Sequence[Event]) -> list[Event]:
        """Keep events to be told; return the new ones."""
        known = self._load().known
        new = [each for each in {each.id: each for each in events}.values() if each.id not in known]
        self._append([{"add": each.to_json()} for each in new])
        return new

    def list_pending(self) -> list[Event]:
        """Return the events that are to be told, oldest first. Raises StoreError for a damaged file."""
        # Those of one second in the order in which they were found.
        return sorted(self._load().pending.values(), key=lambda each: each.when)

    def begin(self, events: Sequence[Event], now: float) -> Message:
        """Write down the message that is sent next."""
        message = Message(tuple(events[:MAX_EVENTS]), began=now)
        self._append([{"begin": [each.id for each in message.events], "at": now}])
        return message

    def find_message(self) -> Message | None:
        """Return the message on its way; None if there is none. Raises StoreError for a damaged file."""
        return self._load().message

    def record_failed(self, message: Message) -> None:
        """Write down how often a message has failed, and when it is sent again."""
        self._append([{"failed": message.attempts, "at": message.not_before, "problem": message.problem}])

    def record_told(self, message: Message, now: float) -> None:
        """Record that a message has arrived; from then on it is never sent again."""
        self._append([{"told": [each.id for each in message.events], "at": now}])

    def record_refused(self, message: Message, now: float) -> None:
        """Put a message away that the server does not take."""
        self._append([{"refused": [each.to_json() for each in message.events], "at": now}])

    def list_recent(self, since: float) -> list[float]:
        """Return when messages were sent since a Unix time."""
        return [line["at"] for line in self._load().ended if "told" in line and line["at"] > since]

    def forget_sent(self, now: float) -> None:
        """Remove events that were told long ago, while no message is on its way."""
        found = self._load()
        kept = [line for line in found.ended if "refused" in line or now - line["at"] <= SENT_DAYS * 86400]
        if found.message is None and len(kept) < len(found.ended):
            self._replace([*kept, *({"add": each.to_json()} for each in found.pending.values())])

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        if not self.path.exists():
            self._replace([*_list_old(self.folder), *lines])
        elif lines:
            append_lines(self.path, map(_format, lines))

    def _replace(self, lines: Sequence[dict[str, Any]]) -> None:
        write_lines(self.path, map(_format, lines))
        for kind in _OLD:
            remove(self.folder / kind)

    def _load(self) -> _Contents:
        found = _Contents()
        try:
            if self.path.exists():
                lines = [parse_json(line.content) for line in read_lines(self.path)]
            else:
                lines = _list_old(self.folder)
            for line in lines:
                found.apply(line, str(self.path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"{self.path}: cannot be read as what a channel is to be told ({error!r}). Remove the line, or the file"
            ) from None
        return found


_OLD = ("pending", "sent", "refused", "message.json", "recent.json")


def _list_old(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines for the files of an earlier version, one for each event. A message on its way is sent anew."""
    for kind in ("sent", "refused"):
        for path in (folder / kind).glob("[!.]*.json"):
            yield {"told": [path.stem], "at": path.stat().st_mtime}
    for path in sorted((folder / "pending").glob("[!.]*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        yield {"add": read_json(path)}


def _format(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode()


FILE = ".looked_through.json"


@dataclass
class SeenRecords:
    """The records of one target and strategy that were looked through: up to `number`, when the file was `stamp`."""

    number: int
    stamp: list[int]


@dataclass
class Bookmark:
    """The newest records and runs looked through; saved once their events are in the outboxes.

    Attributes:
        service, decisions: by `target/strategy`.
        people: what people said of targets, by the name of the file.
        runs_after: Unix time up to which runs were looked at.
        runs: those that were, and ended shortly before that, with the time.
    """

    service: dict[str, SeenRecords] = field(default_factory=dict)
    decisions: dict[str, SeenRecords] = field(default_factory=dict)
    people: dict[str, SeenRecords] = field(default_factory=dict)
    runs_after: float = 0.0
    runs: dict[str, float] = field(default_factory=dict)

    def save(self, var: Path) -> None:
        (var / FOLDER).mkdir(parents=True, exist_ok=True)
        publish_json(var / FOLDER / FILE, asdict(self))


def find_bookmark(var: Path) -> Bookmark | None:
    """Return the bookmark; None before the first look. Raises StoreError if it is damaged."""
    path = var / FOLDER / FILE
    try:
        values = read_json(path)
        seen = {
            name: {
                key: SeenRecords(int(each["number"]), [int(n) for n in each["stamp"]])
                for key, each in values[name].items()
            }
            for name in ("service", "decisions", "people")
        }
        runs = {str(run): float(at) for run, at in values["runs"].items()}
        return Bookmark(**seen, runs_after=float(values["runs_after"]), runs=runs)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{path}: cannot be read ({error}). Remove the file: what happened until then is told no more"
        ) from None
