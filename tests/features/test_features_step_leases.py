"""Leases are held until their optimizer step is acknowledged, and each is released once."""

from __future__ import annotations

from pathlib import Path

import pytest
from features_toys import CountingStore, ToyTokens, filled_store, pad_collate, toy_ref, toy_tensors
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.features.contracts import FeatureHandle
from draftworks.features.joined_store import JoinedStore
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.packing import PackLimits
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.features.step_leases import StepLeases


class ReleaseLog(CountingStore):
    """Remembers what was released."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def release(self, handle: FeatureHandle) -> None:
        self.released.append(handle.sample_id)


def handle(sample_id: str) -> FeatureHandle:
    return FeatureHandle(sample_id, 0, sample_id)


STEPS = st.lists(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3), max_size=5)


@given(STEPS, st.integers(0, 6))
def test_steps_are_released_in_order_and_each_lease_once(steps, acknowledged):
    """Samples of a step in micro-batches; a sample may come in several steps."""
    store, number = ReleaseLog(), 0
    leases, expected = StepLeases(store), []
    for step in steps:
        for turn, batch in enumerate(step, start=1):
            handles = [handle(f"{number + index}") for index in range(len(batch) + 1)]  # one of padding
            number += len(handles)
            for each in handles:
                leases.take(each)
            leases.hand_out([f"s{sample}" for sample in batch], handles, ends_step=turn == len(step))
    leases.take(handle("read ahead"))
    for step in steps[:acknowledged]:
        leases.release([f"s{sample}" for batch in step for sample in batch])
    done = len(store.released)
    assert done <= number
    assert store.released == [f"{index}" for index in range(done)]
    if all(any(step) for step in steps):
        expected = sum(len(batch) + 1 for step in steps[:acknowledged] for batch in step)
        assert done == expected
    assert len(leases) == number + 1 - done
    leases.release_all()
    assert sorted(store.released) == sorted([*(f"{index}" for index in range(number)), "read ahead"])
    assert len(leases) == 0


@pytest.mark.parametrize("named", [["s1"], ["s0", "s2"], ["s0", "s0", "s1"], ["s2", "s3"], ["s0", "s1", "s2"], ["x"]])
def test_only_whole_steps_from_the_oldest_on_are_released(named):
    store = ReleaseLog()
    leases = StepLeases(store)
    for first, second in (("s0", "s1"), ("s2", "s3")):
        for sample_id, ends_step in ((first, False), (second, True)):
            leases.take(handle(sample_id))
            leases.hand_out([sample_id], [handle(sample_id)], ends_step)
    with pytest.raises(ValueError, match="do not end the oldest of the 2 optimizer steps"):
        leases.release(named)
    assert store.released == []
    leases.release(["s1", "s0", "s3", "s2"])
    assert store.released == ["s0", "s1", "s2", "s3"]


def test_a_step_in_training_is_not_released():
    leases = StepLeases(ReleaseLog())
    leases.hand_out(["s0"], [], ends_step=False)
    with pytest.raises(ValueError, match="not acknowledged"):
        leases.release(["s0"])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_loader_holds_leases_until_they_are_acknowledged(tmp_path: Path, prefetch: int):
    store, refs = filled_store(tmp_path, 13)
    counting = CountingStore(JoinedStore(store, ToyTokens(refs)))
    plain = [
        b.sample_ids
        for b in FeatureDataLoader.for_training(refs, counting, 2, pad_collate, global_batch_size=4, prefetch=prefetch)
    ]
    assert counting.leased == 0
    loader = FeatureDataLoader.for_training(
        refs, counting, 2, pad_collate, global_batch_size=4, prefetch=prefetch, release_on_ack=True
    )
    leases, step, seen = loader.leases, [], []
    assert leases is not None
    for batch in loader:
        step += batch.sample_ids
        seen.append(batch.sample_ids)
        assert counting.leased >= len(leases) >= len(step)  # a thread may be between its read and its lease
        if batch.ends_step:
            leases.release(step)
            step = []
    assert seen == plain
    assert counting.leased == len(leases) == 0


def test_an_abandoned_loader_keeps_leases_until_all_are_released(tmp_path: Path):
    store, refs = filled_store(tmp_path, 8)
    counting = CountingStore(store)
    loader = FeatureDataLoader.for_training(refs, counting, 1, pad_collate, prefetch=3, release_on_ack=True)
    for _ in loader:
        break
    assert loader.leases is not None
    assert counting.leased == len(loader.leases) >= 1
    loader.leases.release_all()
    assert counting.leased == 0


def test_in_a_consume_once_store_an_acknowledged_step_is_gone_and_no_other(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path)
    refs = [store.put(ref, toy_tensors(ref)) for ref in map(toy_ref, range(6))]
    loader = FeatureDataLoader.for_packed_training(
        refs, store, PackLimits(12), pad_collate, global_batch_size=3, prefetch=2, release_on_ack=True
    )
    step: list[str] = []
    for batch in loader:
        step += batch.sample_ids
        if batch.ends_step:
            break
    assert loader.leases is not None
    loader.leases.release(step)
    kept = []
    for ref in refs:
        try:
            store.get(ref)
            kept.append(ref.sample_id)
        except StoreError:
            assert ref.sample_id in step
    assert sorted(kept + step) == [ref.sample_id for ref in refs]
