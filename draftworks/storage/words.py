"""Numbers and lists in sentences that people read. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable


def shorten(text: str, most: int) -> str:
    """Return a text as one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 window", "0 windows" and "1,200 windows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def list_names(names: Iterable[object], most: int = 5, none: str = "none", between: str = ", ") -> str:
    """Return the first names of a list, and how many more it has: "a, b and 3 more". No list is cut without that."""
    known = [str(each) for each in names]
    if len(known) <= most:
        return between.join(known) or none
    return f"{between.join(known[:most])} and {len(known) - most:,} more"


def list_lines(lines: Iterable[str], most: int) -> str:
    """Return the first lines of a list, and a last one that says how many more there are."""
    known = list(lines)
    more = [f"  and {len(known) - most:,} more"] if len(known) > most else []
    return "\n".join([*known[:most], *more])
