"""The table of how servers accept is the table of the code, row by row."""

from __future__ import annotations

from pathlib import Path

from draftworks.config.decoding import RULES, SERVER_RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
SECTION = "### How servers accept above temperature 0"


def rows_of_the_page() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").split(SECTION, 1)[1].split("\n#", 1)[0]
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_row_of_the_code_stands_in_the_page_in_its_order():
    written = rows_of_the_page()
    assert len(written) == len(SERVER_RULES)
    for row, cells in zip(SERVER_RULES, written, strict=True):
        server, strategies, flags, rule, source = cells
        assert (server, rule) == (row.server, f"`{row.rule}`")
        assert strategies.replace("`", "").split(", ") == list(row.strategies)
        assert flags.strip("`") == (row.flags or "–")
        assert source == f"`{row.source}`" + (f"; {row.note}" if row.note else "")


def test_every_rule_is_explained_on_the_page():
    text = PAGE.read_text(encoding="utf-8").split(SECTION, 1)[1]
    assert all(f"* `{rule}`:" in text for rule in RULES)
