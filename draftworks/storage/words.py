"""Numbers in sentences that people read. Standard library only."""

from __future__ import annotations


def shorten(text: str, most: int) -> str:
    """Return a text as one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 window", "0 windows" and "1,200 windows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
