"""Tables and words that the parts of a report's markdown share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LONGEST_CELL = 40


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns in the order in which they are first met; empty without a row."""
    from tabulate import tabulate

    cells = [{header: _cell(text) for header, text in row.items()} for row in rows]
    return tabulate(cells, headers="keys", tablefmt="pipe", disable_numparse=True, missingval="")


def decoding(temperature: float | None) -> str:
    """How a loop chose its tokens."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def _cell(text: str) -> str:
    """Values of the eval data may hold anything, also what would break a table."""
    text = " ".join(str(text).split())
    text = text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 1]}…"
    return text.replace("|", "\\|")
