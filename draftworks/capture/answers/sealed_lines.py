"""Records as JSON lines that carry a checksum of their own bytes, so that a changed digit is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from draftworks.storage.regular_files import parse_json

_SEAL = b', "checksum": "%b"}\n'
_SEAL_LENGTH = len(_SEAL % (b"0" * 16))


def seal(record: Mapping[str, Any]) -> bytes:
    """The record's line: its JSON, and as the last field the first 16 hex digits of the SHA-256 of that JSON."""
    body = json.dumps(record, ensure_ascii=True).encode()
    return body[:-1] + _SEAL % _checksum(body)


def is_intact(line: bytes) -> bool:
    """Whether a line is, byte for byte, one that `seal` made."""
    body = line[:-_SEAL_LENGTH] + b"}"
    return line == body[:-1] + _SEAL % _checksum(body)


def unseal(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a line was made of."""
    return {key: value for key, value in record.items() if key != "checksum"}


def make_header(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The first record of a file in which every other one is sealed."""
    return {"identity": dict(identity), "sealed": True}


def is_sealed_file(first_line: bytes) -> bool:
    """Whether the file that begins so has checksums: those of before have none."""
    try:
        return parse_json(first_line).get("sealed") is True
    except (ValueError, AttributeError):
        return False


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()
