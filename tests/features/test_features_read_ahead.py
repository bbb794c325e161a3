"""Samples are read ahead in their order, within the bound, and nothing that fails is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from features_toys import toy_ref
from waiting import wait_until

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.feature_cache import ReadAhead

SIZE = 100


class Source:
    """Reads samples of `SIZE` bytes, counted; those in `bad` fail."""

    def __init__(self, bad: frozenset[str] = frozenset()) -> None:
        self.read_ids: list[str] = []
        self.running = self.most = 0
        self._bad = bad
        self._lock = threading.Lock()

    def read(self, ref: SampleRef) -> dict[str, torch.Tensor]:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.read_ids.append(ref.sample_id)
        time.sleep(0.002)
        with self._lock:
            self.running -= 1
        if ref.sample_id in self._bad:
            raise StoreError(f"sample {ref.sample_id} is altered")
        return {key: torch.tensor(int(ref.sample_id[1:])) for key in ref.feature_keys.values()}


def make(source: Source, limit: int = 3 * SIZE, threads: int = 2) -> ReadAhead:
    return ReadAhead(source.read, lambda ref: SIZE, limit, threads)


REFS = [toy_ref(index) for index in range(12)]


def take_all(ahead: ReadAhead, refs: list[SampleRef]) -> list[int]:
    return [int(next(iter(ahead.take(ref).values()))) for ref in refs]


def test_what_was_expected_comes_in_order_and_is_read_once():
    source = Source()
    ahead = make(source)
    ahead.expect(REFS)
    assert take_all(ahead, REFS) == list(range(12))
    assert sorted(source.read_ids) == sorted(ref.sample_id for ref in REFS)
    assert source.most <= 2
    ahead.close()


def test_no_more_is_held_than_the_bound():
    source = Source()
    ahead = make(source)
    ahead.expect(REFS)
    for count in (3, 4):
        wait_until(lambda count=count: len(source.read_ids) >= count, f"{count} reads")
        time.sleep(0.03)
        assert len(source.read_ids) == count
        ahead.take(REFS[count - 3])
    ahead.close()


def test_a_sample_larger_than_the_bound_is_read_alone():
    source = Source()
    ahead = make(source, limit=SIZE // 2)
    ahead.expect(REFS[:3])
    assert take_all(ahead, REFS[:3]) == [0, 1, 2]
    ahead.close()


def test_an_error_is_raised_where_its_sample_is_taken():
    ahead = make(Source(frozenset({"s1"})))
    ahead.expect(REFS[:3])
    assert ahead.take(REFS[0])
    with pytest.raises(StoreError, match="sample s1"):
        ahead.take(REFS[1])
    assert ahead.take(REFS[2])
    ahead.close()


def test_what_was_not_expected_or_not_begun_is_left_to_the_caller():
    ahead = make(Source(), limit=SIZE)
    assert ahead.take(REFS[5]) == {}
    ahead.expect(REFS[:2])
    assert ahead.take(REFS[1]) == {}
    assert ahead.take(REFS[0])
    ahead.close()


def test_a_reader_that_stops_gives_its_room_back():
    source = Source()
    ahead = make(source)
    for _ in range(4):
        ahead.expect(REFS)
        ahead.take(REFS[0])
        ahead.forget()
    ahead.expect(REFS[6:9])
    assert take_all(ahead, REFS[6:9]) == [6, 7, 8]
    ahead.close()
    assert ahead._held == 0
