"""Splits and selections by hash of an id: adding data never moves existing data."""

from __future__ import annotations

import hashlib


def hash_fraction(sample_id: str, purpose: str) -> float:
    """Return a number in [0, 1) that depends on id and purpose only; different purposes are independent."""
    raw = hashlib.sha256(f"{purpose}\0{sample_id}".encode()).digest()
    return int.from_bytes(raw[:6], "big") / 2**48


def is_held_out(sample_id: str, share: float) -> bool:
    """Whether a sample belongs to the eval set `heldout`. A larger share keeps everything a smaller one held out."""
    return hash_fraction(sample_id, "held-out") < share
