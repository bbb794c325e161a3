"""Validation of names that are used as partition keys and path components."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def require_name(value: str) -> str:
    """Return `value` if it is safe as a partition key and as a path component; raise ValueError otherwise."""
    if not NAME.fullmatch(value) or "..." in value:
        raise ValueError(
            f"{value!r} is not a name: lower-case letters, digits, '.', '_' and '-', at most 63, and never '...'"
        )
    return value
