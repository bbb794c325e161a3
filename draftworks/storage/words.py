"""Numbers in sentences that people read. Standard library only."""

from __future__ import annotations


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 window", "0 windows" and "1,200 windows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
