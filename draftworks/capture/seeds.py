"""Random numbers of servers, decided by what is asked and not by when or by whom."""

from __future__ import annotations

from hashlib import sha256


def request_seed(seed: int, key: str) -> int:
    """A seed for one request, 0 to 2**31 - 1: `key` tells it from the others of a run."""
    hashed = sha256(f"{seed}/{key}".encode()).digest()
    return int.from_bytes(hashed[:4], "big") >> 1
