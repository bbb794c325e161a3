"""Tables for a terminal of any width: no word and no digest is ever broken. Standard library only.

A table that is too wide has short digests, then cells of several lines; where that reads badly it becomes a list with
a block for each row.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

SHORT_DIGEST = 8
"""Characters of a digest that commands take for it where no other result begins so."""
_GAP = "  "
_MOST_LINES = 1.5
"""Lines of a row on average, from which on a list reads better."""
_LEAST_TEXT = 24
"""Characters beside the label of a block's line, below which the text begins on a line of its own."""


@dataclass(frozen=True)
class TextTable:
    """Texts in rows and columns.

    Attributes:
        caption: what a reader has to know, below the table.
        right: columns of numbers, which are aligned to the right and never broken into lines.
        digests: columns of digests, which may be shortened.
        heads: number of the first columns that name a row: the heading of its block in a list.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    right: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()
    heads: int = 1

    @classmethod
    def of(cls, title: str, rows: Iterable[Mapping[str, str]], **more: object) -> TextTable:
        """Return the table of rows that have the same keys, which are the columns."""
        found = list(rows)
        columns = tuple(found[0]) if found else ()
        cells = tuple(tuple(" ".join(str(row[name]).split()) for name in columns) for row in found)
        return replace(cls(title, columns, cells), **more)  # type: ignore[arg-type]


def find_terminal_width() -> int | None:
    """Return the characters of a line of the terminal; None where the output goes into a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(table: TextTable) -> None:
    """Print a table as wide as the terminal; into a file or a pipe as wide as it is."""
    print(render_text_table(table, find_terminal_width()))


def render_text_table(table: TextTable, width: int | None = None) -> str:
    """Return a table in lines of at most `width` characters, unless a single word is longer; None: of any length."""
    parts = [*fill(table.title, width), *_render_body(table, width), *fill(table.caption, width)]
    return "\n".join(line.rstrip() for line in parts)


def _render_body(table: TextTable, width: int | None) -> list[str]:
    if not table.rows:
        return []
    if width is None or _measure(table) <= width:
        return _render_columns(table, _list_widths(table))
    short = _shorten_digests(table)
    if _measure(short) <= width:
        return _render_columns(short, _list_widths(short))
    widths = _find_narrow_widths(short, width)
    if widths is not None:
        lines = _render_columns(short, widths)
        if len(lines) - 2 <= _MOST_LINES * len(table.rows):
            return lines
    return [*_render_blocks(table, width), *([""] if table.caption else [])]


def _measure(table: TextTable) -> int:
    return sum(_list_widths(table)) + len(_GAP) * (len(table.columns) - 1)


def _list_widths(table: TextTable) -> list[int]:
    return [max(map(len, column)) for column in zip(table.columns, *table.rows)]


def _find_narrow_widths(table: TextTable, width: int) -> list[int] | None:
    """Return widths that fit and break no word; None if there are none."""
    wanted = _list_widths(table)
    found = [
        full if name in table.right else max(len(word) for cell in column for word in cell.split() or [""])
        for name, full, column in zip(table.columns, wanted, zip(table.columns, *table.rows))
    ]
    room = width - len(_GAP) * (len(found) - 1) - sum(found)
    if room < 0:
        return None
    for at in sorted(range(len(found)), key=lambda at: wanted[at] - found[at]):
        more = min(wanted[at] - found[at], room)
        found[at], room = found[at] + more, room - more
    return found


def _shorten_digests(table: TextTable) -> TextTable:
    at = [number for number, name in enumerate(table.columns) if name in table.digests]
    rows = tuple(
        tuple(_shorten(cell) if number in at else cell for number, cell in enumerate(row)) for row in table.rows
    )
    return replace(table, rows=rows)


def _shorten(cell: str) -> str:
    """Return a cell with its digest, which is its first word, shortened."""
    first, _, rest = cell.partition(" ")
    return f"{first[:SHORT_DIGEST]} {rest}".strip()


def _render_columns(table: TextTable, widths: Sequence[int]) -> list[str]:
    rule = tuple("-" * width for width in widths)
    right = [name in table.right for name in table.columns]
    return [line for row in (table.columns, rule, *table.rows) for line in _render_row(row, widths, right)]


def _render_row(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    cells = [fill(cell, width) or [""] for cell, width in zip(row, widths)]
    for number in range(max(map(len, cells))):
        texts = [cell[number] if number < len(cell) else "" for cell in cells]
        yield _GAP.join(
            text.rjust(width) if is_right else text.ljust(width) for text, width, is_right in zip(texts, widths, right)
        )


def _render_blocks(table: TextTable, width: int) -> Iterator[str]:
    names = table.columns[table.heads :]
    label = max(map(len, names), default=0)
    for number, row in enumerate(table.rows):
        if number:
            yield ""
        yield from fill(", ".join(filter(None, row[: table.heads])), width)
        for name, cell in zip(names, row[table.heads :]):
            if cell:
                yield from _render_labelled(name.ljust(label), cell, width)


def _render_labelled(label: str, text: str, width: int) -> Iterator[str]:
    begin = f"{_GAP}{label}{_GAP}"
    if width - len(begin) < min(_LEAST_TEXT, len(text)):
        yield begin.rstrip()
        begin = _GAP * 2
        yield from (f"{begin}{line}" for line in fill(text, width - len(begin)))
        return
    for number, line in enumerate(fill(text, width - len(begin))):
        yield f"{begin if number == 0 else ' ' * len(begin)}{line}"


def print_text(text: str) -> None:
    """Print a paragraph in lines of the terminal; into a file or a pipe as one line."""
    print("\n".join(fill(text, find_terminal_width())))


def fill(text: str, width: int | None) -> list[str]:
    """Return a text in lines of at most `width` characters without breaking a word; None: as one line."""
    if not text:
        return []
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
