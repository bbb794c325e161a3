"""Pages in Markdown, by templates, and their tables: of reports, the leaderboard, model cards and the Dagster UI."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.evaluation.acceptance_length import (
    NAME,
    NOTE,
    RUNG_MEANINGS,
    STORED_NOTE,
    SYMBOL,
    format_change,
    format_interval,
    format_length,
    name_metric,
)

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parents[2]
_WORDS = {"NAME": NAME, "NOTE": NOTE, "STORED_NOTE": STORED_NOTE, "SYMBOL": SYMBOL, "RUNG_MEANINGS": RUNG_MEANINGS}


def render_page(template: str, **values: Any) -> str:
    """Return a page that a template of this package makes of values; of several blank lines one is kept.

    Nothing is escaped: what may hold anything, such as texts of a registry or of an eval set, goes through `render_table`,
    or through the filter `e` on an HTML page.

    Args:
        template: its path in the package. It has the words and the filters of an acceptance length.
    """
    text = _open_templates().get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@functools.cache
def _open_templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.globals |= _WORDS
    made.filters |= {
        "tau": format_length,
        "metric": name_metric,
        "measured": format_measured,
        "count": lambda count: f"{count:,}",
        "percent": format_share,
        "change": lambda found: format_change(found.difference, found.interval.low, found.interval.high, 2),
        "table": render_table,
    }
    return made


def format_measured(found: Any, value: float | None = None) -> str:
    """Format a measured acceptance with its interval; over one prompt it is left out: a width of 0 would look like certainty.

    Args:
        found: has `low`, `high` and `prompts`.
    """
    if found.low is None or found.high is None or found.prompts == 1:
        return format_length(value)
    return f"{format_length(value)} ({format_interval(found.low, found.high, between='–')})"


def format_share(share: float) -> str:
    """Format a share as a percentage, rounded down so that only all is 100%."""
    return f"{math.floor(share * 10_000) / 100:.2f}%"


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
