"""The compact set of ids is a set."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from draftworks.dataflow import id_set
from draftworks.dataflow.id_set import SampleIdSet


@given(st.lists(st.text(max_size=3), max_size=60), st.lists(st.text(max_size=3), max_size=10), st.integers(0, 5))
def test_it_is_a_set(ids, others, merge):
    before, id_set._SMALLEST_MERGE = id_set._SMALLEST_MERGE, merge
    try:
        found, model = SampleIdSet(), set()
        for sample_id in ids:
            assert found.add(sample_id) == (sample_id not in model)
            model.add(sample_id)
            assert len(found) == len(model)
        assert all((sample_id in found) == (sample_id in model) for sample_id in ids + others)
        assert len(SampleIdSet(ids)) == len(model)
    finally:
        id_set._SMALLEST_MERGE = before


def test_trailing_zero_bytes_of_a_digest_mean_something(monkeypatch):
    """numpy does not tell b"a" from b"a\\0"; digests have one length, so it does not matter."""
    digests = {"one": b"a" * 15 + b"\0", "two": b"a" * 14 + b"\0\0", "three": b"\0" * 16}
    monkeypatch.setattr(id_set, "_digest", digests.__getitem__)
    monkeypatch.setattr(id_set, "_SMALLEST_MERGE", 0)
    found = SampleIdSet(["one", "three"])
    assert ["one" in found, "two" in found, "three" in found] == [True, False, True]
    assert [found.add("two"), found.add("two")] == [True, False]


def test_many_ids_take_little_memory():
    tracemalloc.start()
    try:
        found = SampleIdSet(f"run:{number:08d}" for number in range(30_000))
        assert len(found) == 30_000
        assert tracemalloc.get_traced_memory()[0] < 1_500_000
    finally:
        tracemalloc.stop()
