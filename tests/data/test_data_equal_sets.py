"""Three training sets of one size: of one kind, of the other, and of both in the proportions of the data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.tokenized import TokenRow, choose_equal_sets
from draftworks.errors import DataError


def row(number: int, way: str, length: int) -> TokenRow:
    columns = {"thinking": way, "thinking_pair": f"p{number}"}
    return TokenRow(f"p{number}.{way}", np.zeros(length, dtype=np.int32), np.ones(length, dtype=np.bool_), columns)


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=30).filter(lambda found: sum(found) >= 30)


@given(on=lengths, off=lengths, limit=st.integers(30, 600), data=st.data())
def test_all_sets_have_the_tokens_of_the_smaller_kind_and_the_order_of_the_data_does_not_matter(on, off, limit, data):
    rows = [row(n, "on", length) for n, length in enumerate(on)] + [row(n, "off", size) for n, size in enumerate(off)]
    sets = choose_equal_sets(rows, limit)
    budget = min(sum(on), sum(off), limit)
    for members in sets.values():
        assert budget - 30 < sum(map(len, members)) <= budget  # the longest sample may not have fitted
    for way in ("on", "off"):
        assert {one.columns["thinking"] for one in sets[way]} == {way}
    mixed = choose_equal_sets(data.draw(st.permutations(rows)), limit)["mixed"]
    assert [one.sample_id for one in mixed] == [one.sample_id for one in sets["mixed"]]


def test_the_mixed_set_has_the_proportions_of_the_data():
    rows = [row(n, "on" if n % 4 == 0 else "off", 10) for n in range(800)]
    mixed = choose_equal_sets(rows, 2_000)["mixed"]
    assert 35 <= sum(one.columns["thinking"] == "on" for one in mixed) <= 65  # a quarter of 200


def test_a_kind_without_a_sample_is_an_error():
    with pytest.raises(DataError, match="there is none with thinking off: set its share in mix.shares above 0"):
        choose_equal_sets([row(1, "on", 4)], 100)
    with pytest.raises(DataError, match=r"no sample of off fits into 4 tokens: raise comparison.tokens"):
        choose_equal_sets([row(1, "on", 4), row(2, "off", 9)], 100)
