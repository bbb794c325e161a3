"""The channels of a deployment: keep events for all of them, write and send messages that are due."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from draftworks.config.operations import NotificationSpec
from draftworks.config.urls import require_private
from draftworks.errors import ConfigError, DraftworksError
from draftworks.notifications.outbox import MAX_EVENTS, TEST, Event, Message, Outbox
from draftworks.storage.file_lock import try_lock
from draftworks.storage.http_call import Posted, post_json
from draftworks.storage.words import format_count

LISTED = 20
"""Events that a collected message for people names; it counts the others. A webhook gets all of them."""
SOURCE = "draftworks"


def build_slack_body(events: Sequence[Event]) -> bytes:
    """Return the body for Slack: one text, in which a link has Slack's own form."""
    return json.dumps({"text": build_text(events, _format_slack_link, _escape)}).encode()


def build_webhook_body(key: str, events: Sequence[Event]) -> bytes:
    """Return the body for a webhook: the same text, and every event with its id."""
    body: dict[str, Any] = {
        "source": SOURCE,
        "id": key,
        "text": build_text(events, lambda link: link, lambda text: text),
        # Whoever has that many events to read wants their titles; the others are in the run's pages.
        "events": [replace(each, text="").to_json() if len(events) > LISTED else each.to_json() for each in events],
    }
    return json.dumps(body).encode()


def build_text(events: Sequence[Event], format_link: Any, escape: Any) -> str:
    """Return a message for people: one event in full, or several as a line each with their numbers by kind."""
    if len(events) == 1:
        (event,) = events
        parts = [_format_line(event, escape), escape(event.text), "" if event.link is None else format_link(event.link)]
        return "\n".join(part for part in parts if part)
    counts = Counter(each.kind for each in events)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    lines = [f"{len(events)} events: {kinds}", *(_format_line(each, escape) for each in events[:LISTED])]
    return "\n".join([*lines, *([f"and {len(events) - LISTED} more"] if len(events) > LISTED else [])])


def _format_line(event: Event, escape: Any) -> str:
    return escape(": ".join(part for part in (event.kind, event.target, event.title) if part))


def _escape(text: str) -> str:
    """Replace the three characters that Slack reads as markup, so that no event mentions a channel or hides a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _format_slack_link(link: str) -> str:
    return f"<{_escape(link)}>"


FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 3600.0
REFUSALS = 3
GIVE_UP_S = 7 * 86400.0
REFUSED_STATUSES = (400, 405, 410, 413, 415, 422)
"""The server will not take this message however often it is sent."""

Post = Callable[[str, bytes, Mapping[str, str], float, str], Posted]


@dataclass(frozen=True)
class Address:
    """Address and headers of a channel's messages. It may contain a token, and is never shown."""

    url: str
    headers: Mapping[str, str]
    shown_as: str


def resolve_address(spec: NotificationSpec, environment: Mapping[str, str] = os.environ) -> Address:
    """Return the address of a channel. Raises ConfigError if the environment lacks it, or its key."""
    headers = {"User-Agent": "draftworks"}
    if spec.api_key_env is not None:
        headers["Authorization"] = f"Bearer {_read_variable(spec, 'api_key_env', spec.api_key_env, environment)}"
    if spec.url is not None:
        return Address(spec.url, headers, spec.url)
    assert spec.url_env is not None
    url = _read_variable(spec, "url_env", spec.url_env, environment)
    try:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError("no address")
        require_private(url)
    except ValueError:
        raise ConfigError(
            f"notifications: {spec.channel}: {spec.url_env} holds no https address (http on this machine is allowed too)"
        ) from None
    return Address(url, headers, f"the address in {spec.url_env}")


def _read_variable(spec: NotificationSpec, key: str, name: str, environment: Mapping[str, str]) -> str:
    value = environment.get(name, "").strip()
    if not value or not value.isprintable() or not value.isascii() or " " in value:
        raise ConfigError(
            f"notifications: {spec.channel}: {key}: the environment has no value in {name}: set it where Dagster's daemon "
            "and code location run"
        )
    return value


def deliver(
    box: Outbox, spec: NotificationSpec, now: Callable[[], float], deadline: float, post: Post = post_json
) -> list[str]:
    """Send the messages that are due, and return the outcomes in words. The caller holds the outbox's lock.

    At most `max_messages` are sent in `window_s`; where more events wait than that leaves, they go into one message.

    Args:
        now: Unix time; `deadline` is one, after which no message is begun.

    Raises:
        ConfigError: the environment lacks the address. What waits goes on waiting.
        StoreError: a file of the outbox is damaged.
    """
    words: list[str] = []
    address: Address | None = None
    while now() < deadline:
        message = box.find_message() or _compose(box, spec, now())
        if message is None or message.not_before > now():
            break
        address = address or resolve_address(spec)
        said = _attempt(box, spec, message, address, now, post)
        words += said.words
        if not said.told:
            break
    return words


@dataclass(frozen=True)
class _Said:
    """The outcome of an attempt; `told` is whether the next message may follow."""

    told: bool
    words: list[str]


def _compose(box: Outbox, spec: NotificationSpec, now: float) -> Message | None:
    """Return the next message of the events that wait; None if there are none, or no message is allowed yet."""
    pending = box.list_pending()
    allowed = spec.max_messages - len(box.list_recent(now - spec.window_s))
    if not pending or allowed <= 0:
        return None
    return box.begin(pending[:1] if len(pending) <= allowed else pending[:MAX_EVENTS], now)


def _attempt(
    box: Outbox, spec: NotificationSpec, message: Message, address: Address, now: Callable[[], float], post: Post
) -> _Said:
    posted = send_events(spec, message.events, message.key, address, post)
    count = len(message.events)
    if not posted.problem:
        box.record_told(message, now())
        return _Said(True, [f"{spec.channel}: told {format_count(count, 'event')}"])
    problem = posted.problem[:300]
    attempts = message.attempts + 1
    refused = posted.status in REFUSED_STATUSES and attempts >= REFUSALS
    if refused or now() - message.began > GIVE_UP_S:
        box.record_refused(message, now())
        lost, tried = format_count(count, "event"), format_count(attempts, "attempt")
        return _Said(True, [f"{spec.channel}: given up: {lost} after {tried}: {problem}"])
    pause_s = posted.retry_after_s or FIRST_PAUSE_S * 2 ** min(attempts - 1, 12)
    later = now() + min(pause_s, LONGEST_PAUSE_S)
    box.record_failed(replace(message, attempts=attempts, not_before=later, problem=problem))
    return _Said(False, [f"{spec.channel}: attempt {attempts} failed: {problem}"])


def send_events(
    spec: NotificationSpec, events: tuple[Event, ...], key: str, address: Address, post: Post = post_json
) -> Posted:
    """Send one message. A server that takes idempotency keys shows a repeated one once."""
    if spec.kind == "slack":
        body, headers = build_slack_body(events), address.headers
    else:
        body, headers = build_webhook_body(key, events), {**address.headers, "Idempotency-Key": key}
    return post(address.url, body, headers, spec.timeout_s, address.shown_as)


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
        new: set[str] = set()
        for spec, box in self._boxes:
            new |= {each.id for each in box.add([each for each in events if spec.wants(each.kind, each.target)])}
        return len(new)

    def send(
        self,
        warn: Callable[[str], None],
        limit_s: float,
        now: Callable[[], float] = time.time,
        post: Post = post_json,
    ) -> list[str]:
        """Send the messages that are due, in all at most about `limit_s`; return the outcomes in words.

        A problem is a warning.
        """
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
