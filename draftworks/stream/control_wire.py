"""Messages between a control server and its clients: length-prefixed JSON, proven by a shared secret.

A frame is four bytes of length (big-endian) and as much JSON. JSON has fewer types than the calls: a tuple is
`{"t": [...]}`, a mapping `{"m": {...}}`, a record of the control plane `{"d": name, "f": {...}}`, and references are one
slim set `{"r": headers, "l": lines}`. Nothing else is constructed.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import SampleRef
from draftworks.storage.files import parse_json, read_bytes
from draftworks.stream.metadata_store import (
    AckedStep,
    AckResult,
    CommitResult,
    ConsumerProgress,
    DeadLetter,
    PromptTask,
    RefPage,
    TaskCounts,
    TaskFailure,
    TaskLease,
    Watermark,
)
from draftworks.stream.ref_set import RefSet

PROTOCOL = 2
MAX_MESSAGE_BYTES = 64 << 20
MAX_HELLO_BYTES = 4096
MIN_TOKEN_BYTES = 16
TOKEN_ENV = "DRAFTWORKS_CONTROL_TOKEN"
_LENGTH = struct.Struct(">I")
_RECORDS = {
    kind.__name__: kind
    for kind in (
        *(PromptTask, TaskLease, TaskFailure, DeadLetter, TaskCounts),
        *(AckedStep, AckResult, CommitResult, ConsumerProgress, RefPage, Watermark),
    )
}


class MessageTooLarge(StoreError):
    """A message is larger than both sides accept."""


def load_token(file: Path | None = None, env: str = TOKEN_ENV) -> bytes:
    """Return the shared secret from a file, or else from an environment variable; white space around it is left out.

    Raises:
        ConfigError: neither is given, the file cannot be read, or the secret has under `MIN_TOKEN_BYTES` bytes.
    """
    where = f"the environment variable {env}" if file is None else str(file)
    try:
        token = os.environ.get(env, "").encode() if file is None else read_bytes(file, MAX_HELLO_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: the shared secret of the control server cannot be read: {error}") from error
    return require_token(token.strip(), where)


def require_token(token: bytes, where: str) -> bytes:
    """Return the secret. Raises ConfigError if it is too short."""
    if len(token) < MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{where}: expected a shared secret of at least {MIN_TOKEN_BYTES} bytes for the control server, found "
            f"{len(token)}. Make one with: openssl rand -hex 32"
        )
    return token


def prove(token: bytes, role: str, *nonces: str) -> str:
    """Return the proof that `role` ("server" or "client") knows the secret, which itself is never sent."""
    return hmac.new(token, json.dumps([PROTOCOL, role, *nonces]).encode(), "sha256").hexdigest()


def send_message(connection: socket.socket, value: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Send one frame. Raises MessageTooLarge before anything is sent, OSError if the connection fails."""
    content = json.dumps(value, separators=(",", ":")).encode()
    if len(content) > max_bytes:
        raise MessageTooLarge(
            f"a control-plane message has {len(content):,} bytes, more than {max_bytes:,}: call with smaller batches"
        )
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_message(connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Return the value of one frame.

    Raises:
        MessageTooLarge: the length says so; nothing of the message is read.
        ConnectionError: the other side has closed the connection, or what it sent is no JSON.
        OSError: the connection failed, or timed out.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > max_bytes:
        raise MessageTooLarge(f"a control-plane message of {length:,} bytes: expected at most {max_bytes:,}")
    try:
        return parse_json(_receive(connection, length))
    except ValueError as error:
        raise ConnectionError(f"what came is not a control-plane message: {error}") from error


def to_wire(value: Any) -> Any:
    """Return a value of JSON. Raises TypeError for what the control plane does not carry."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind is list:
        return [to_wire(each) for each in value]
    if kind is tuple:
        if value and all(type(each) is SampleRef for each in value):
            packed = RefSet.of(value)
            return {"r": packed.headers, "l": packed.lines}
        return {"t": [to_wire(each) for each in value]}
    if isinstance(value, Mapping):
        return {"m": {_require_text(key): to_wire(each) for key, each in value.items()}}
    if _RECORDS.get(kind.__name__) is kind:
        return {"d": kind.__name__, "f": {each.name: to_wire(getattr(value, each.name)) for each in fields(value)}}
    raise TypeError(f"the control plane carries no {kind.__name__}")


def from_wire(value: Any) -> Any:
    """Return what `to_wire` was given. Raises StoreError for anything that it does not write."""
    if isinstance(value, list):
        return [from_wire(each) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        if "r" in value:
            return RefSet(tuple(value["r"]), tuple((index, line) for index, line in value["l"])).refs()
        if "t" in value:
            return tuple([from_wire(each) for each in value["t"]])
        if "m" in value:
            return {key: from_wire(each) for key, each in value["m"].items()}
        return _RECORDS[value["d"]](**{name: from_wire(each) for name, each in value["f"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"a control-plane message is damaged, or of another version: {error!r}") from error


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed by the other side")
        parts += part
    return bytes(parts)


def _require_text(key: object) -> str:
    if type(key) is not str:
        raise TypeError(f"the control plane carries mappings with text as keys, found {key!r}")
    return key
