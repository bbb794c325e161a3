"""Events, and those that a channel is still to be told of; durable, whole after a kill at any moment.

    {var}/notifications/{channel}/pending/{id}.json   an event that is to be told
    {var}/notifications/{channel}/sent/{id}.json      one that was told
    {var}/notifications/{channel}/refused/{id}.json   one that the server does not take
    {var}/notifications/{channel}/message.json        the message that is being sent: its events, attempts, next time
    {var}/notifications/{channel}/recent.json         when the last messages were sent
    {var}/notifications/{channel}/.lock/              the lease of the process that sends

A message is written down before it is sent, and marked as told by one rename afterwards. A process that is killed between
the two sends the same message again, with the same key; otherwise every event is told exactly once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.files import publish_json, read_json
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
PENDING, SENT, REFUSED = "pending", "sent", "refused"
MESSAGE, RECENT, LOCK = "message.json", "recent.json", ".lock"
MAX_BYTES = 1 << 25
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
        told: whether it has arrived.
        problem: why the last attempt failed.
    """

    events: tuple[Event, ...]
    attempts: int = 0
    not_before: float = 0.0
    began: float = 0.0
    told: bool = False
    problem: str = ""

    @property
    def key(self) -> str:
        """The idempotency key: the same for the same events."""
        return digest(sorted(each.id for each in self.events))


@dataclass(frozen=True)
class Outbox:
    """The outbox of one channel. Whoever writes holds its lock."""

    var: Path
    channel: str

    @property
    def folder(self) -> Path:
        return self.var / FOLDER / require_name(self.channel)

    @property
    def lock(self) -> Path:
        """The lock's folder, whose parent is made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / LOCK

    def add(self, event: Event) -> bool:
        """Keep an event to be told; False if it is known already."""
        name = f"{event.id}.json"
        if any((self.folder / kind / name).exists() for kind in (SENT, PENDING, REFUSED)):
            return False
        self._make(PENDING)
        publish_json(self.folder / PENDING / name, event.to_json())
        return True

    def list_pending(self) -> list[Event]:
        """Return the events that are to be told, oldest first. Raises StoreError for a damaged file."""
        # Those of one second in the order in which they were found.
        paths = sorted(
            (self.folder / PENDING).glob("[!.]*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)
        )
        return sorted((Event.from_json(_read(path), str(path)) for path in paths), key=lambda each: each.when)

    def count_pending(self) -> int:
        return sum(1 for _ in (self.folder / PENDING).glob("[!.]*.json"))

    def begin(self, events: Sequence[Event], now: float) -> Message:
        """Write down the message that is sent next."""
        message = Message(tuple(events[:MAX_EVENTS]), began=now)
        self.save(message)
        return message

    def save(self, message: Message) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        publish_json(self.folder / MESSAGE, asdict(message))

    def find_message(self) -> Message | None:
        """Return the message on its way; None if there is none. One that has arrived is put away first."""
        path = self.folder / MESSAGE
        try:
            values = read_json(path, MAX_BYTES)
            events = tuple(Event.from_json(each, str(path)) for each in values.pop("events"))
            message = Message(events, **values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"{path}: cannot be read as a message ({error}). Remove the file") from None
        if message.told:
            self._put_away(message, SENT)
            return None
        return message

    def record_told(self, message: Message, now: float) -> None:
        """Record that a message has arrived; from the first rename on it is never sent again."""
        self.save(replace(message, told=True))
        publish_json(self.folder / RECENT, [*self.list_recent(0.0)[-99:], now])
        self._put_away(message, SENT)

    def record_refused(self, message: Message) -> None:
        """Put a message away that the server does not take."""
        self._put_away(message, REFUSED)

    def list_recent(self, since: float) -> list[float]:
        """Return when messages were sent since a Unix time."""
        try:
            return [float(each) for each in read_json(self.folder / RECENT, MAX_BYTES) if float(each) > since]
        except (OSError, ValueError, TypeError):
            return []  # a lost one costs a message more than wanted

    def forget_sent(self, now: float) -> None:
        """Remove what was told long ago."""
        for path in (self.folder / SENT).glob("*.json"):
            with suppress(FileNotFoundError):
                if now - path.stat().st_mtime > SENT_DAYS * 86400:
                    path.unlink()

    def _put_away(self, message: Message, kind: str) -> None:
        self._make(kind)
        for each in message.events:
            name = f"{each.id}.json"
            with suppress(FileNotFoundError):  # put away before a kill
                os.utime(self.folder / PENDING / name, (time.time(), time.time()))
                os.replace(self.folder / PENDING / name, self.folder / kind / name)
        (self.folder / MESSAGE).unlink(missing_ok=True)

    def _make(self, kind: str) -> None:
        (self.folder / kind).mkdir(parents=True, exist_ok=True)


def _read(path: Path) -> Any:
    try:
        return read_json(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read as an event ({error}). Remove the file") from None
