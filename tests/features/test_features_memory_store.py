"""The memory store: room is exact, waited for or refused, and never exceeded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from features_toys import toy_ref, toy_tensors
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_harness import StoreHarness, put
from store_keyed_contract import FreeingContract
from torch import Tensor
from waiting import HANG_S

from draftworks.errors import StoreError, StoreFullError
from draftworks.features.contracts import SampleRef
from draftworks.features.memory_store import MemoryFeatureStore

BYTES_OF_ONE = 2 * 4 * 4 * 4
"""Of the toy sample 1: two features of four tokens."""


class MemoryHarness(StoreHarness):
    keyed = True
    shared = False

    def __init__(self) -> None:
        self.store = MemoryFeatureStore()

    def open(self, max_hold_age_s: float = 3600.0) -> MemoryFeatureStore:
        self.store._leases.max_hold_age_s = max_hold_age_s
        return self.store

    def alter(self, stored: Tensor) -> None:
        self._find(stored).view(-1).view(torch.uint8)[0] ^= 0x10

    def truncate(self, stored: Tensor) -> None:
        self._find(stored).resize_(1)

    def stored_bytes(self) -> int:
        return self.store.health()["resident_bytes"]

    def leftovers(self) -> list[str]:
        return []

    def _find(self, stored: Tensor) -> Tensor:
        return next(each.tensor for each in self.store._stored.values() if torch.equal(each.tensor, stored))


class TestMemoryFeatureStore(FreeingContract):
    @pytest.fixture
    def harness(self) -> MemoryHarness:
        return MemoryHarness()


def test_refuse_raises_at_once_and_keeps_what_is_there():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE, when_full="refuse")
    ref = put(store, 1)
    for error in (StoreFullError, StoreError, MemoryError):
        with pytest.raises(error, match="sample s6: a feature of 64 bytes has no room .*: 128 of 128 bytes are taken"):
            put(store, 6)
    store.release(store.get(put(store, 1))[1])
    assert store.free(ref.feature_keys.values()) == BYTES_OF_ONE
    put(store, 6)


@pytest.mark.parametrize("when_full", ["block", "refuse"])
def test_what_never_fits_is_an_error_that_waiting_does_not_mend(when_full):
    store = MemoryFeatureStore(max_resident_bytes=63, when_full=when_full)
    with pytest.raises(
        StoreError, match="sample s1 has a feature of 64 bytes, and the memory store may hold 63"
    ) as caught:
        put(store, 1)
    assert not isinstance(caught.value, StoreFullError)


def test_block_ends_in_an_error_when_nobody_frees():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE, put_timeout_s=0.05)
    put(store, 1)
    start = time.monotonic()
    with pytest.raises(StoreFullError, match=r"sample s6: .* has no room in the memory store for 0.05 s"):
        put(store, 6)
    assert time.monotonic() - start >= 0.05


@contextmanager
def putting(store: MemoryFeatureStore, index: int) -> Iterator[Future[SampleRef]]:
    """Context in which a thread puts a sample and waits for room."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(put, store, index)
        with pytest.raises(TimeoutError):
            future.result(0.05)
        yield future


def test_block_goes_on_when_a_sample_is_freed():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE)
    ref = put(store, 1)
    with putting(store, 6) as future:
        store.free(ref.feature_keys.values())
        assert future.result()
    assert store.health()["resident_bytes"] == BYTES_OF_ONE


def test_producers_and_consumers_stay_below_the_limit_and_lose_nothing():
    limit, peak = 3 * BYTES_OF_ONE, 0
    store = MemoryFeatureStore(max_resident_bytes=limit, put_timeout_s=HANG_S)
    refs: list[SampleRef] = []
    there = threading.Condition()

    def produce(start: int) -> None:
        for count in range(40):
            ref = put(store, start + 5 * count)
            with there:
                refs.append(ref)
                there.notify()

    def consume() -> None:
        nonlocal peak
        for _ in range(40):
            with there:
                assert there.wait_for(lambda: refs, HANG_S)
                ref = refs.pop()
            tensors, handle = store.get(ref)
            peak = max(peak, store.health()["resident_bytes"])
            assert torch.equal(tensors["last"], toy_tensors(ref)["last"])
            store.release(handle)
            store.free(ref.feature_keys.values())

    with ThreadPoolExecutor(4) as pool:
        turns = [pool.submit(produce, 1), pool.submit(produce, 10001), pool.submit(consume), pool.submit(consume)]
        for turn in turns:
            turn.result()
    assert 0 < peak <= limit
    assert store.health() | {"features": 0, "resident_bytes": 0, "leases": 0} == store.health()


class MemoryStoreMachine(RuleBasedStateMachine):
    """Random puts and frees of one thread, compared with a dictionary of sizes by key."""

    limit = 1000

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryFeatureStore(max_resident_bytes=self.limit, when_full="refuse")
        self.model: dict[str, int] = {}

    @rule(index=st.integers(0, 60))
    def put(self, index: int):
        ref = toy_ref(index)
        sizes = {ref.feature_keys[name]: tensor.nbytes for name, tensor in toy_tensors(ref).items()}
        try:
            self.store.put(ref, toy_tensors(ref))
        except StoreFullError:
            assert sum(({**self.model, **sizes}).values()) > self.limit
            sizes = {key: size for key, size in sizes.items() if not self.store.find_missing([key])}
        self.model |= sizes

    @rule(index=st.integers(0, 60))
    def free(self, index: int):
        keys = list(toy_ref(index).feature_keys.values())
        assert self.store.free(keys) == sum(self.model.pop(key, 0) for key in keys)

    @invariant()
    def accounts_are_exact(self):
        found = self.store.health()
        assert found["resident_bytes"] == sum(self.model.values()) <= self.limit
        assert found["features"] == len(self.model)


TestMemoryStoreMachine = MemoryStoreMachine.TestCase
