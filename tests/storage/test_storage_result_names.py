"""A result goes by one name, and by any begin of it that no other has; a data version is answered with the name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.storage.records import choose_name

NAMES = st.text("0123456789abcdef", min_size=16, max_size=16)
KNOWN = {"722c2df91289f306": "ab" * 32, "722c000000000000": "cd" * 32, "9f8e7d6c5b4a3210": "cd" * 32}


@given(st.sets(NAMES, min_size=1, max_size=5), st.data())
def test_a_begin_names_what_begins_with_it_if_that_is_one(names, data):
    name = data.draw(st.sampled_from(sorted(names)))
    begin = name[: data.draw(st.integers(1, 16))]
    known = dict.fromkeys(names)
    if sum(each.startswith(begin) for each in names) == 1:
        assert choose_name(begin, known) == name
    else:
        with pytest.raises(StoreError, match="several drafts begin with"):
            choose_name(begin, known)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("ab" * 32, "is the data version of draft 722c2df91289f306, which goes by that name: give 722c2df91289f306"),
        ("cd" * 8, "is the data version of draft 722c000000000000 and 9f8e7d6c5b4a3210"),
        ("abab", "no draft 'abab'; there are: 722c2df91289f306, 722c000000000000, 9f8e7d6c5b4a3210"),
        ("", "no draft ''"),
        ("722c", "several drafts begin with 722c: 722c2df91289f306, 722c000000000000"),
    ],
)
def test_what_names_no_draft_is_answered_with_those_that_there_are(wrong, said):
    with pytest.raises(StoreError, match=said):
        choose_name(wrong, KNOWN)
