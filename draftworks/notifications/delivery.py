"""Sends what is in a channel's outbox: retries with back-off, and many events in one message."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from draftworks.config.notifications import NotificationSpec, require_private
from draftworks.endpoints.json_post import Posted, post_json
from draftworks.errors import ConfigError
from draftworks.notifications.event import Event
from draftworks.notifications.messages import build_slack_body, build_webhook_body
from draftworks.notifications.outbox import MAX_EVENTS, Message, Outbox
from draftworks.storage.words import format_count

FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 3600.0
REFUSALS = 3
GIVE_UP_S = 7 * 86400.0
REFUSED_STATUSES = (400, 405, 410, 413, 415, 422)
"""The server will not take this message however often it is sent."""

Post = Callable[[str, bytes, Mapping[str, str], float, str], Posted]


@dataclass(frozen=True)
class Address:
    """Where a channel's messages go, and with what headers. It may contain a token, and is never shown."""

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
    """Send what is due, and return what happened in words. The caller holds the outbox's lock.

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
    """What came of an attempt; `told` is whether the next message may follow."""

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
        box.record_refused(message)
        lost, tried = format_count(count, "event"), format_count(attempts, "attempt")
        return _Said(True, [f"{spec.channel}: given up: {lost} after {tried}: {problem}"])
    pause_s = posted.retry_after_s or FIRST_PAUSE_S * 2 ** min(attempts - 1, 12)
    later = now() + min(pause_s, LONGEST_PAUSE_S)
    box.save(replace(message, attempts=attempts, not_before=later, problem=problem))
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
