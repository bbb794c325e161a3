"""Channels whose messages are appended to a file, and a clock that is set."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftworks.config.operations import NotificationSpec
from draftworks.notifications.channels import Channels
from draftworks.notifications.outbox import Bookmark, Event
from draftworks.notifications.records import keep_new_events
from draftworks.storage.http_call import Posted

WHEN = "2026-05-01T12:00:00+00:00"


def make_event(subject: object, kind: str = "promotion", target: str = "small") -> Event:
    return Event.make(kind, target, subject, f"about {subject}", "more", WHEN)


def webhook(**values) -> NotificationSpec:
    return NotificationSpec.model_validate({"kind": "webhook", "url": "http://127.0.0.1:9", "name": "hook", **values})


class NoRuns:
    """An instance of Dagster without runs."""

    def begin(self, bookmark: Bookmark) -> None:
        pass

    def find(self, bookmark: Bookmark) -> list[Event]:
        return []


@dataclass
class Told:
    """Stands for servers: each message that arrives is a line of a file, which outlives a killed process."""

    file: Path
    answers: list[Posted] = field(default_factory=list)
    """What is answered, in turn; then success."""

    def post(self, url: str, payload: bytes, headers: Mapping[str, str], timeout_s: float, shown_as: str) -> Posted:
        if self.answers and (answer := self.answers.pop(0)).problem:
            return answer
        line = json.dumps({"url": url, "key": headers.get("Idempotency-Key"), "body": json.loads(payload)}) + "\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, line.encode())
        os.close(handle)
        return Posted("ok", "", 200)

    @property
    def messages(self) -> list[dict]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    @property
    def ids(self) -> list[str]:
        """Ids of the events that arrived, in order."""
        return [event["id"] for message in self.messages for event in message["body"]["events"]]


@dataclass
class Desk:
    """Channels of one folder of results, with servers in a file, and a clock."""

    var: Path
    specs: list[NotificationSpec]
    now: float = 1_000_000.0
    told: Told = field(init=False)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.told = Told(self.var / "told.jsonl")

    def send(self, *events: Event) -> list[str]:
        """Keep events and send what is due."""
        with Channels(self.var, self.specs) as channels:
            assert channels.is_held
            channels.add(events)
            return channels.send(self.warnings.append, 60.0, lambda: self.now, self.told.post)

    def tick(self) -> int | None:
        """Look for what has happened, as the sensor does, and send what is due."""
        with Channels(self.var, self.specs) as channels:
            assert channels.is_held
            new = keep_new_events(self.var, channels, NoRuns(), self.warnings.append)
            channels.send(self.warnings.append, 60.0, lambda: self.now, self.told.post)
            return new
