"""Markdown tables of reports, the leaderboard, model cards and the Dagster UI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def render_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = (), max_cell_length: int | None = None
) -> str:
    """Return a Markdown table with one line per row; its columns are the keys, in the order in which they first occur.

    Line breaks, runs of spaces and `|` in a cell cannot break the table: texts from a registry or an eval set may hold
    anything.

    Args:
        columns: headers of a table without a row; by default such a table is the empty string.
        max_cell_length: characters after which a cell is cut off.
    """
    from tabulate import tabulate

    cells = [{name: _escape(value, max_cell_length) for name, value in row.items()} for row in rows]
    headers = "keys" if cells else list(columns)
    return tabulate(cells, headers=headers, tablefmt="pipe", disable_numparse=True, missingval="")


def _escape(value: Any, max_length: int | None) -> str:
    text = " ".join(str(value).split())
    if max_length is not None and len(text) > max_length:
        text = f"{text[: max_length - 1]}…"
    return text.replace("|", "\\|")
