"""Validation of names that are used as partition keys and path components."""

from __future__ import annotations

import re
import unicodedata

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def require_name(value: str) -> str:
    """Return `value` if it is safe as a partition key and as a path component; raise ValueError otherwise."""
    if not NAME.fullmatch(value) or "..." in value:
        allowed = "lower-case letters, digits, '.', '_' and '-', at most 63, and never '...'"
        raise ValueError(f"{value!r} is not a name: {allowed}{_suggest_name(value)}")
    return value


def _suggest_name(value: str) -> str:
    """Return the closest name to a text as the end of a message; empty where nothing is left of it."""
    plain = unicodedata.normalize("NFKD", value.casefold()).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9._-]+|\.{3,}", "-", plain).strip("-._")[:63]
    return f"; did you mean {name}?" if NAME.fullmatch(name) else ""
