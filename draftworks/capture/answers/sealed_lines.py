"""Records as JSON lines with a checksum of their own bytes, so that any change of a line is detected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from draftworks.storage.regular_files import parse_json

_SEAL = b', "checksum": "%b"}\n'
_SEAL_LENGTH = len(_SEAL % (b"0" * 16))


def seal(record: Mapping[str, Any]) -> bytes:
    """Return the record's line: its JSON with, as the last field, the first 16 hex digits of that JSON's SHA-256."""
    body = json.dumps(record, ensure_ascii=True).encode()
    return body[:-1] + _SEAL % _checksum(body)


def is_intact(line: bytes) -> bool:
    """Return whether a line equals, byte for byte, a line that `seal` returned."""
    body = line[:-_SEAL_LENGTH] + b"}"
    return line == body[:-1] + _SEAL % _checksum(body)


def unseal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without its checksum."""
    return {key: value for key, value in record.items() if key != "checksum"}


def make_header(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first record of a file in which every other record is sealed."""
    return {"identity": dict(identity), "sealed": True}


def is_sealed_file(first_line: bytes) -> bool:
    """Return whether a file with this first line has checksums; files of earlier versions have none."""
    try:
        return parse_json(first_line).get("sealed") is True
    except (ValueError, AttributeError):
        return False


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()
