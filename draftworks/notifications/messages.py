"""The bodies of messages: Slack's incoming webhook, and plain JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftworks.notifications.event import Event

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
    """Return what people read: one event in full, or several as a line each with their numbers by kind."""
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
