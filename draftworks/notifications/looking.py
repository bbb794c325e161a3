"""One look at what has happened: find new events, keep them for the channels, and mark how far it was looked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from draftworks.notifications.bookmark import Bookmark, find_bookmark
from draftworks.notifications.channels import Channels
from draftworks.notifications.event import Event
from draftworks.notifications.records import find_decision_events, find_hold_events, find_service_events


class RunEvents(Protocol):
    """Where events of runs come from."""

    def begin(self, bookmark: Bookmark) -> None:
        """Mark all runs that have ended as looked at."""

    def find(self, bookmark: Bookmark) -> list[Event]:
        """Return the events of runs that ended since, and bring the bookmark up to date."""
        ...


def keep_new_events(var: Path, channels: Channels, runs: RunEvents, warn: Callable[[str], None]) -> int | None:
    """Keep what has happened since the last look for the channels; return the number of events.

    The first look only marks where it begins, and returns None. Events are kept before the mark moves: a process that is
    killed between the two finds them again, and the outboxes know those that they have.

    Raises:
        StoreError: the bookmark is damaged.
    """
    bookmark = find_bookmark(var)
    if bookmark is None:
        bookmark = Bookmark()
        runs.begin(bookmark)
        _find_records(var, bookmark, warn, quiet=True)
        bookmark.save(var)
        return None
    new = channels.add([*runs.find(bookmark), *_find_records(var, bookmark, warn, quiet=False)])
    bookmark.save(var)
    return new


def _find_records(var: Path, bookmark: Bookmark, warn: Callable[[str], None], quiet: bool) -> list[Event]:
    return [
        *find_service_events(var, bookmark.service, warn, quiet),
        *find_decision_events(var, bookmark.decisions, warn, quiet),
        *find_hold_events(var, bookmark.people, warn, quiet),
    ]
