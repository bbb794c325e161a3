"""Names that are partition keys and parts of paths."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def require_name(value: str) -> str:
    """The value if it can safely be a partition key and a path component; ValueError otherwise."""
    if not NAME.fullmatch(value) or "..." in value:
        raise ValueError(
            f"{value!r} is not a name: lower-case letters, digits, '.', '_' and '-', at most 63, and never '...'"
        )
    return value
