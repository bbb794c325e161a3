"""The channels of a deployment: keep events for all of them, and send what is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from draftworks.config.notifications import NotificationSpec
from draftworks.endpoints.json_post import Posted, post_json
from draftworks.errors import DraftworksError
from draftworks.notifications.delivery import Post, deliver, resolve_address, send_events
from draftworks.notifications.event import TEST, Event
from draftworks.notifications.outbox import Outbox
from draftworks.storage.file_lock import try_lock


class Channels:
    """The outboxes of all channels, held by this process.

    Use as a context; `is_held` is whether no other process sends. Otherwise nothing is kept or sent at this time: what
    happened is found again at the next look.
    """

    def __init__(self, var: Path, specs: Sequence[NotificationSpec]) -> None:
        self._boxes = [(spec, Outbox(var, spec.channel)) for spec in specs]
        self._stack = ExitStack()
        self.is_held = False

    def __enter__(self) -> Channels:
        leases = [self._stack.enter_context(try_lock(box.lock)) for _, box in self._boxes]
        self.is_held = all(lease is not None for lease in leases)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, events: Sequence[Event]) -> int:
        """Keep events for the channels that want them; return how many were new to one."""
        new = [
            each.id
            for each in events
            for spec, box in self._boxes
            if spec.wants(each.kind, each.target) and box.add(each)
        ]
        return len(set(new))

    def send(
        self,
        warn: Callable[[str], None],
        limit_s: float,
        now: Callable[[], float] = time.time,
        post: Post = post_json,
    ) -> list[str]:
        """Send what is due, in all at most about `limit_s`; return what happened in words. A problem is a warning."""
        words: list[str] = []
        for spec, box in self._boxes:
            deadline = now() + limit_s / len(self._boxes)
            try:
                words += deliver(box, spec, now, deadline, post)
                box.forget_sent(now())
            except DraftworksError as error:
                warn(str(error))
        return words


def send_test(spec: NotificationSpec) -> Posted:
    """Send one test message at once. Raises ConfigError if the environment lacks the channel's address."""
    event = Event.make(TEST, "", time.time_ns(), "a test message of draftworks notify --test")
    return send_events(spec, (event,), event.id, resolve_address(spec))
