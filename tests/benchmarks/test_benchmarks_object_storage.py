"""The benchmark of object storage: shares are medians of quotients, and all sides read what was written."""

from __future__ import annotations

from pathlib import Path

import object_storage
import pytest
from object_storage import Turns, compare_reading, make_samples, started_server


def test_shares_are_medians_of_the_rounds_quotients():
    turns = Turns({"bare": [1.0, 2.0, 30.0], "ours": [2.0, 4.0, 3.0]})
    assert turns.compare("bare", "ours") == 0.5


def test_samples_have_the_size_that_was_asked_for():
    for ref, tensors in make_samples(2, 1.0):
        assert sum(tensor.nbytes for tensor in tensors.values()) == 1 << 20
        assert tensors.keys() == ref.feature_keys.keys()


@pytest.mark.cluster
def test_all_sides_are_measured_on_a_server(tmp_path: Path):
    with started_server(tmp_path / "server") as place:
        place = object_storage.Place(place.url, place.access, 2)
        turns = compare_reading(place, samples=4, mib=0.1, rounds=2, folder=tmp_path / "reading")
    assert {len(seconds) for seconds in turns.seconds.values()} == {2}
    assert len(turns.seconds) == 4
