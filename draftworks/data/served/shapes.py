"""Shapes in which servers and gateways log chat requests, read as prompts.

* a request body of `/v1/chat/completions` on its own: `{"model": …, "messages": […], …}`, also with `response` or
  `choices` beside it;
* `{"request": BODY, "response": …}`, where the request may also be `{"body": BODY}`;
* a line of OpenAI's Batch API: `{"custom_id": …, "url": "/v1/chat/completions", "body": BODY}`;
* SGLang's JSON log: `{"timestamp": …, "event": "request.received.openai", "obj": BODY}`; its other events repeat the same
  request as tokens or rendered text and are passed over.

Reasons for a rejection are fixed texts: they never quote a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from draftworks.data.conversations import Turn
from draftworks.data.formats import OPENAI_ROLES, TOOL_KEYS

MAX_SOURCE_LENGTH = 64
SGLANG_REQUEST = "request.received.openai"
SGLANG_CUT = 2048
"""Characters that SGLang's log keeps of a text at --log-requests-level 2: the first half, `...` and the last half."""
ON, OFF, DEFAULT = "on", "off", "default"
_CREATED_KEYS = ("timestamp", "created_at", "created", "time", "ts")
_MAX_SECONDS = 32_503_680_000.0
"""The year 3000; larger numbers are milliseconds."""


class ShapeError(ValueError):
    """The reason, without a word of the row, for which a row gives no prompt."""


@dataclass(frozen=True)
class ServedPrompt:
    """A logged request.

    Attributes:
        turns: its messages; the last one is not an assistant's.
        thinking: whether the request switched thinking on or off, or left it to the template (`default`).
        source: value of the field that names the source; None without it.
        created: seconds since the epoch; None if the row does not say.
    """

    turns: tuple[Turn, ...]
    thinking: str
    source: str | None
    created: float | None


def parse_served(row: Any, source_field: str | None = None) -> ServedPrompt | None:
    """Return the prompt of a logged row, or None for an event of a log that is no chat request.

    Raises:
        ShapeError: it has no request of a known shape, or one that cannot be a prompt.
    """
    if not isinstance(row, dict):
        raise ShapeError("not an object")
    if isinstance(row.get("event"), str) and "messages" not in row and "request" not in row:
        if row["event"] != SGLANG_REQUEST:
            return None
        body = row.get("obj")
        _require_uncut(body)
    else:
        body = find_body(row)
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ShapeError("no request with a list of messages")
    if any(body.get(key) for key in TOOL_KEYS):
        raise ShapeError("conversations with tools are not supported yet")
    turns = tuple(_parse_message(message) for message in body["messages"])
    if not any(turn.role == "user" for turn in turns):
        raise ShapeError("no user message")
    if turns[-1].role == "assistant":
        raise ShapeError("the last message is the assistant's")
    return ServedPrompt(turns, find_thinking(body, row), find_source(row, body, source_field), find_created(row))


def find_body(row: Mapping[str, Any]) -> Any:
    for key in ("request", "body"):
        inner = row.get(key)
        if isinstance(inner, dict):
            return inner["body"] if isinstance(inner.get("body"), dict) else inner
    return row


def _require_uncut(body: Any) -> None:
    """Raise ShapeError for a request whose texts SGLang's log has cut."""
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if message == "...":
            raise ShapeError("cut by the server's log: set --log-requests-level 3")
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            half = SGLANG_CUT // 2
            if isinstance(text, str) and len(text) == SGLANG_CUT + 3 and text[half : half + 3] == "...":
                raise ShapeError("cut by the server's log: set --log-requests-level 3")


def _parse_message(message: Any) -> Turn:
    if not isinstance(message, dict):
        raise ShapeError("a message is not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in OPENAI_ROLES:
        raise ShapeError("a message has an unknown role")
    if OPENAI_ROLES[role] == "tool" or any(message.get(key) for key in TOOL_KEYS):
        raise ShapeError("conversations with tools are not supported yet")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ShapeError("a message has content that is not text")
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str) or not content.strip():
        raise ShapeError("a message has no text")
    if not is_unicode(content):
        raise ShapeError("a message is not Unicode text (a lone surrogate)")
    return Turn(OPENAI_ROLES[role], content)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON escapes may hold half of a pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_thinking(body: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return what the request asked for; where it did not, an answer with thoughts in it shows that it was on."""
    options = body.get("chat_template_kwargs")
    for name in ("enable_thinking", "thinking"):
        if isinstance(options, dict) and isinstance(options.get(name), bool):
            return ON if options[name] else OFF
    wanted = body.get("thinking")
    if isinstance(wanted, dict) and wanted.get("type") in ("enabled", "disabled"):
        return ON if wanted["type"] == "enabled" else OFF
    effort = body.get("reasoning_effort")
    if isinstance(effort, str) and effort:
        return OFF if effort == "none" else ON
    response = row.get("response")
    response = response.get("body", response) if isinstance(response, dict) else row
    choices = response.get("choices") if isinstance(response, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        message = choice.get("message") if isinstance(choice, dict) else None
        if isinstance(message, dict) and (message.get("reasoning_content") or message.get("reasoning")):
            return ON
    return DEFAULT


def find_source(row: Mapping[str, Any], body: Mapping[str, Any], field: str | None) -> str | None:
    """Return the value at a dotted path of the row or of the request's body, if it is a short text or number."""
    for start in (row, body) if field is not None else ():
        value: Any = start
        for name in (field or "").split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)[:MAX_SOURCE_LENGTH]
        if isinstance(value, str) and value.strip() and is_unicode(value):
            return value.strip()[:MAX_SOURCE_LENGTH]
    return None


def find_created(row: Mapping[str, Any]) -> float | None:
    response = row.get("response")
    places = [row, response, response.get("body")] if isinstance(response, dict) else [row]
    for place in places:
        for key in _CREATED_KEYS if isinstance(place, dict) else ():
            found = _to_seconds(place.get(key))
            if found is not None:
                return found
    return None


def _to_seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            return None
        try:
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        except (OverflowError, OSError):
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    seconds = seconds / 1000 if seconds > _MAX_SECONDS else seconds
    return seconds if seconds <= _MAX_SECONDS else None
