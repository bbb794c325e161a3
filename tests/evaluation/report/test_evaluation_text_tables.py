"""Tables for a terminal of any width, and in Markdown: no word is broken, and no cell breaks the table."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.report.text_tables import SHORT_DIGEST, TextTable, render_text_table

WORD = st.text(
    st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters="-,"), min_size=1, max_size=24
)
CELL = st.lists(WORD, max_size=6).map(" ".join)
INDENT = 4
DIGEST = "0123456789abcdef"


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
    names = draw(st.lists(WORD, min_size=1, max_size=8, unique=True))
    rows = draw(st.lists(st.tuples(*(CELL for _ in names)), min_size=1, max_size=4))
    some = st.frozensets(st.sampled_from(names))
    heads = draw(st.integers(1, len(names)))
    return TextTable(draw(CELL), tuple(names), tuple(rows), draw(CELL), right=draw(some), heads=heads)


@given(table=tables(), width=st.integers(30, 140))
def test_every_word_of_every_cell_is_whole_and_every_line_fits(table: TextTable, width: int):
    shown = render_text_table(table, width)
    words = {word for row in table.rows for cell in row for word in cell.split()}
    assert words <= set(shown.replace(",", " ").split())  # the heads of a block have commas between them
    assert all(len(line) <= width for line in shown.splitlines())


@given(table=tables())
def test_a_table_that_fits_is_a_line_for_each_row(table: TextTable):
    lines = render_text_table(table, 10_000).split("\n")
    assert lines == render_text_table(table, None).split("\n")
    assert len(lines) == bool(table.title) + 2 + len(table.rows) + bool(table.caption)


@pytest.mark.parametrize(("width", "digest"), [(200, DIGEST), (60, DIGEST[:SHORT_DIGEST])])
def test_digests_are_shortened_where_that_is_what_makes_a_table_fit(width: int, digest: str):
    row = ("tiny", "eagle3", f"{DIGEST} (in service)", "0.94 (0.80 to 1.10)")
    table = TextTable("", ("target", "strategy", "draft", "accepted"), (row,), digests=frozenset(("draft",)))
    shown = render_text_table(table, width)
    assert digest in shown.split()
    assert len(shown.splitlines()) == 3


def test_numbers_stay_on_their_line_and_a_list_has_the_heads_above():
    row = (
        "training_features",
        "42.8 k (1.87 k to 50 k)",
        "12.5 (4 to 20) min",
        "measured: " + "of this target, here " * 5,
    )
    columns = ("step", "tokens", "time", "rate")
    table = TextTable("plan", columns, (row, row), right=frozenset(("tokens", "time")))
    shown = render_text_table(table, 60).splitlines()
    assert shown[1] == "training_features"
    assert "  tokens  42.8 k (1.87 k to 50 k)" in shown
    assert "  time    12.5 (4 to 20) min" in shown


def test_a_file_gets_the_whole_table(capsys: pytest.CaptureFixture[str]):
    assert text_tables.find_terminal_width() is None
    text_tables.print_table(TextTable("t", ("a", "b"), (("x " * 200, "y"),)))
    assert max(map(len, capsys.readouterr().out.splitlines())) > 390
    text_tables.print_text("word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_text_is_taken_for_markup():
    table = TextTable("[bold]t[/]", ("a",), (("[red]x",), ("[/nothing]",)))
    assert re.findall(r"\S+", render_text_table(table, 80)) == ["[bold]t[/]", "a", "-" * 10, "[red]x", "[/nothing]"]


def lines_of(text: str) -> list[str]:
    return re.sub(" +", " ", text).splitlines()


def test_columns_are_the_keys_in_the_order_in_which_they_first_occur() -> None:
    lines = lines_of(render_table([{"a": 1, "b": 2}, {"c": 3, "a": None}]))
    assert (lines[0], lines[2:]) == ("| a | b | c |", ["| 1 | 2 | |", "| None | | 3 |"])


def test_no_text_breaks_the_table() -> None:
    lines = lines_of(render_table([{"a": "x|y\nz", "b": "0.10"}]))
    assert lines[2:] == ["| x\\|y z | 0.10 |"]


def test_long_cells_are_cut_only_where_that_is_asked_for() -> None:
    assert lines_of(render_table([{"a": "l" * 50}]))[2] == f"| {'l' * 50} |"
    assert lines_of(render_table([{"a": "l" * 50}], max_cell_length=40))[2] == f"| {'l' * 39}… |"


def test_without_a_row_there_is_a_header_or_nothing() -> None:
    assert render_table([]) == ""
    assert lines_of(render_table([], ("a", "b")))[0] == "| a | b |"
