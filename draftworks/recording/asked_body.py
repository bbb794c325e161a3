"""The body of a request: what it asks for, and the fields by which an engine says what it counted.

A field is added in front of the closing brace; every other byte stays. What the client says itself is never changed.

* `return_spec_tokens_details: true` for SGLang: the answer has a field `sglext`, a stream one more object with it;
* `stream_options: {"include_usage": true}` for a stream: it has one more object with `usage`, on which vLLM's counts ride.

Both objects have no choices. SGLang's /generate says its counts unasked, and so does llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftworks.production.requests import Engine
from draftworks.storage.files import parse_json

CHAT, COMPLETIONS, GENERATE = "/chat/completions", "/completions", "/generate"


@dataclass(frozen=True)
class AskedBody:
    """A request's body.

    Attributes:
        sent: the bytes that go to the server.
        values: what they ask for, without the added fields; None if they are not read, as compressed ones.
    """

    sent: bytes
    values: Mapping[str, Any] | None


def is_recorded(method: str, path: str) -> bool:
    """Whether a request of this path (without its query) asks for answers that are recorded."""
    return method == "POST" and path.endswith((CHAT, COMPLETIONS, GENERATE))


def read_body(path: str, body: bytes, encoding: str, engine: Engine | None, asks: bool = True) -> AskedBody:
    """Return a body with what the engine needs in order to say its counts.

    Args:
        encoding: value of Content-Encoding: a body with one is passed on as it is.
        engine: None if it is not known yet: nothing is added.
        asks: False adds nothing.
    """
    if encoding not in ("", "identity"):
        return AskedBody(body, None)
    try:
        values = parse_json(body.decode("utf-8"))
    except ValueError:
        return AskedBody(body, None)
    if not isinstance(values, dict):
        return AskedBody(body, None)
    added = _list_added(path, values, engine) if asks and values else b""
    if not added:
        return AskedBody(body, values)
    end = body.rindex(b"}")
    return AskedBody(body[:end] + added + body[end:], values)


def _list_added(path: str, values: Mapping[str, Any], engine: Engine | None) -> bytes:
    added = b""
    if engine is None or path.endswith(GENERATE):
        return added
    if engine == "sglang" and "return_spec_tokens_details" not in values:
        added += b',"return_spec_tokens_details":true'
    if values.get("stream") is True and "stream_options" not in values:
        added += b',"stream_options":{"include_usage":true}'
    return added
