"""Markdown tables: any text in a cell, cut cells, and tables without a row."""

from __future__ import annotations

import re

from draftworks.evaluation.report.markdown_tables import render_table


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
