"""The memory store: room is exact, waited for or refused, and never exceeded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from features_toys import toy_ref, toy_tensors
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from store_contract import WritingContract, read
from store_harness import StoreHarness, put
from torch import Tensor
from waiting import HANG_S

from draftworks.errors import StoreError, StoreFullError
from draftworks.features.contracts import FeatureHandle, SampleRef
from draftworks.features.memory_store import MemoryFeatureStore

BYTES_OF_ONE = 2 * 4 * 4 * 4
"""Of the toy sample 1: two features of four tokens."""


class MemoryHarness(StoreHarness):
    consume_once = True
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
        tensors = (t for sample in self.store._samples.values() for t in sample.tensors.values())
        return next(tensor for tensor in tensors if torch.equal(tensor, stored))


class TestMemoryFeatureStore(WritingContract):
    @pytest.fixture
    def harness(self) -> MemoryHarness:
        return MemoryHarness()


def test_refs_carry_store_and_generation():
    store = MemoryFeatureStore()
    first, second = put(store, 1), put(store, 1)
    assert first.feature_store_uri == f"{store.uri}?generation=1"
    assert second.feature_store_uri == f"{store.uri}?generation=2"
    assert store.uri.startswith("mem://")
    with pytest.raises(StoreError, match="sample s1: generation 1 .* is superseded by generation 2"):
        store.get(first)
    for uri in ("", store.uri, f"{store.uri}?generation=x", "mem://other?generation=2", "file:///tmp"):
        with pytest.raises(StoreError, match="sample s1 is in the store"):
            store.get(replace(second, feature_store_uri=uri))


def test_a_sample_is_put_whole():
    store = MemoryFeatureStore()
    with pytest.raises(StoreError, match=r"expected the features \['hf2', 'last'\] at once.*found \['last'\]"):
        store.put(toy_ref(1), {"last": torch.zeros(4, 4)})
    ref = put(store, 1)
    with pytest.raises(StoreError, match="s1 has no feature hf9, it has"):
        store.get(replace(ref, feature_keys={"hf9": "x"}))
    assert store.health()["leases"] == 0


def test_refuse_raises_at_once_and_keeps_what_is_there():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE, when_full="refuse")
    ref = put(store, 1)
    for error in (StoreFullError, StoreError, MemoryError):
        with pytest.raises(
            error, match="sample s6 of 128 bytes has no room .*: 128 of 128 bytes are taken by 1 samples"
        ):
            put(store, 6)
    ref = put(store, 1)
    store.release(store.get(ref)[1])
    put(store, 6)


@pytest.mark.parametrize("when_full", ["block", "refuse"])
def test_what_never_fits_is_an_error_that_waiting_does_not_mend(when_full):
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE - 1, when_full=when_full)
    with pytest.raises(StoreError, match="sample s1 has 128 bytes, and the memory store may hold 127") as caught:
        put(store, 1)
    assert not isinstance(caught.value, StoreFullError)


def test_block_ends_in_an_error_when_nobody_consumes():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE, put_timeout_s=0.05)
    put(store, 1)
    start = time.monotonic()
    with pytest.raises(StoreFullError, match=r"sample s6 .* has no room in the memory store for 0.05 s"):
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


def test_block_goes_on_when_a_sample_is_consumed():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE)
    ref = put(store, 1)
    with putting(store, 6) as future:
        store.release(store.get(ref)[1])
        assert future.result()
    assert store.health()["resident_bytes"] == BYTES_OF_ONE


def test_abort_ends_a_put_that_waits():
    store = MemoryFeatureStore(max_resident_bytes=BYTES_OF_ONE)
    put(store, 1)
    with putting(store, 6) as future:
        store.abort("s6")
        with pytest.raises(StoreError, match="sample s6 was aborted while it was being put"):
            future.result()


def test_gc_removes_old_samples_that_nobody_holds_and_lets_a_put_go_on():
    store = MemoryFeatureStore(max_resident_bytes=2 * BYTES_OF_ONE, max_sample_age_s=0.0)
    held, _ = put(store, 1), put(store, 11)
    handle = store.get(held)[1]
    with putting(store, 6) as future:
        assert store.gc() == BYTES_OF_ONE
        future.result()
    store.release(handle)
    assert store.health()["samples"] == 1


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

    with ThreadPoolExecutor(4) as pool:
        turns = [pool.submit(produce, 1), pool.submit(produce, 10001), pool.submit(consume), pool.submit(consume)]
        for turn in turns:
            turn.result()
    assert 0 < peak <= limit
    assert store.health() | {"samples": 0, "resident_bytes": 0, "leases": 0} == store.health()


@dataclass
class ModelSample:
    generation: int
    size: int
    leases: set[str] = field(default_factory=set)


class MemoryStoreMachine(RuleBasedStateMachine):
    """Random calls of one thread, compared with a dictionary."""

    refs = Bundle("refs")
    handles = Bundle("handles")
    limit = 1000

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryFeatureStore(max_resident_bytes=self.limit, when_full="refuse", max_sample_age_s=0.0)
        self.model: dict[str, ModelSample] = {}
        self.count = 0

    @rule(target=refs, index=st.integers(0, 5), rows=st.integers(0, 40))
    def put(self, index: int, rows: int):
        size, name = rows * 32, f"s{index}"
        ref = replace(toy_ref(index), num_tokens=rows)
        freed = self.model[name].size if name in self.model else 0
        if size > self.limit or self._resident() - freed + size > self.limit:
            with pytest.raises(StoreError) as caught:
                self.store.put(ref, toy_tensors(ref))
            assert isinstance(caught.value, StoreFullError) == (size <= self.limit)
            return multiple()
        self.count += 1
        self.model[name] = ModelSample(self.count, size)
        return self.store.put(ref, toy_tensors(ref))

    @rule(target=handles, ref=refs)
    def get(self, ref: SampleRef):
        known = self.model.get(ref.sample_id)
        if known is None or not ref.feature_store_uri.endswith(f"={known.generation}"):
            with pytest.raises(StoreError, match=f"sample {ref.sample_id}"):
                self.store.get(ref)
            return multiple()
        handle = read(MemoryHarness(), self.store, ref)
        assert handle.generation == known.generation
        known.leases.add(handle.lease_token)
        return handle

    @rule(handle=handles)
    def release(self, handle: FeatureHandle):
        self.store.release(handle)
        known = self.model.get(handle.sample_id)
        if known is not None and handle.lease_token in known.leases:
            known.leases.remove(handle.lease_token)
            if not known.leases:
                del self.model[handle.sample_id]

    @rule(index=st.integers(0, 5))
    def abort(self, index: int):
        self.store.abort(f"s{index}")
        if f"s{index}" in self.model:
            self.model[f"s{index}"].leases.clear()

    @rule(expire=st.booleans())
    def gc(self, expire: bool):
        self.store._leases.max_hold_age_s = -1.0 if expire else 3600.0
        kept = {name: sample for name, sample in self.model.items() if sample.leases and not expire}
        freed = self._resident() - sum(sample.size for sample in kept.values())
        time.sleep(1e-6)
        assert self.store.gc() == freed
        self.model = kept

    @invariant()
    def accounts_are_exact(self):
        found = self.store.health()
        assert found["resident_bytes"] == self._resident() <= self.limit
        assert found["samples"] == len(self.model)
        assert found["leases"] == sum(len(sample.leases) for sample in self.model.values())

    def _resident(self) -> int:
        return sum(sample.size for sample in self.model.values())


TestMemoryStoreMachine = MemoryStoreMachine.TestCase
