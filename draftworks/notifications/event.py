"""What people are told of: an event, and its identity by content."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from draftworks.errors import StoreError
from draftworks.storage.identity import digest

TEST = "test"
MAX_TITLE, MAX_TEXT = 200, 1500


@dataclass(frozen=True)
class Event:
    """Something that people are told of, once.

    Attributes:
        id: digest of kind, target and what the event is about, such as a run or the number of a record.
        kind: one of `draftworks.config.notifications.EVENT_KINDS`, or `test`.
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
