"""Numbers and lists in sentences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.storage.words import format_count, list_lines, list_names


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 windows"), (1, "1 window"), (2, "2 windows"), (1200, "1,200 windows")]
)
def test_one_is_singular_and_all_others_plural(count: int, text: str):
    assert format_count(count, "window") == text


@given(st.lists(st.sampled_from("abc"), max_size=9), st.integers(1, 9))
def test_a_list_has_every_name_or_says_how_many_more(names: list[str], most: int):
    text, _, more = list_names(names, most).partition(" and ")
    shown = [] if text == "none" else text.split(", ")
    assert shown == names[:most]
    assert len(shown) + (int(more.removesuffix(" more")) if more else 0) == len(names)
    lines = list_lines(names, most).splitlines()
    assert lines[:most] == names[:most]
    assert bool(lines[most:]) == (len(names) > most)


def test_what_is_shown_of_lists_is_fixed():
    assert list_names(range(7), 3) == "0, 1, 2 and 4 more"
    assert (list_names([]), list_names(["a", "b"], between="; ")) == ("none", "a; b")
    assert list_lines(["a", "b", "c"], 1) == "a\n  and 2 more"
