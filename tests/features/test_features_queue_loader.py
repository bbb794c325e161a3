"""The loader of arrival order: the micro-batches of a planned step, read ahead without waiting for what has not come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from features_toys import CountingStore, ToyTokens, filled_store, pad_collate
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.features.contracts import SampleRef, TrainBatch
from draftworks.features.loader import QueueDataLoader, packed_steps, padded_steps
from draftworks.features.schedule import PackedTrainSchedule, PackLimits, PaddedTrainSchedule
from draftworks.features.wrapped_store import JoinedStore

SIZE = 4


class ListedSteps:
    """Global batches of a list; `ready` says how many of them have come, None all. Records who asked with `wait`."""

    global_batch_size = SIZE
    stopped_by = 0

    def __init__(self, refs: Sequence[SampleRef], ready: int | None = None, start: int = 0) -> None:
        self.steps = [tuple(refs[at : at + SIZE]) for at in range(0, len(refs) - SIZE + 1, SIZE)]
        self.ready = len(self.steps) if ready is None else ready
        self.step = start
        self.waited: list[int] = []

    @property
    def is_over(self) -> bool:
        return self.step == len(self.steps)

    def next_step(self, wait: bool = True) -> tuple[SampleRef, ...] | None:
        if self.step >= self.ready:
            if not wait:
                return None
            self.waited.append(self.step)
            self.ready = self.step + 1
        self.step += 1
        return self.steps[self.step - 1]


@pytest.fixture
def stored(tmp_path: Path):
    store, refs = filled_store(tmp_path, 14)
    return CountingStore(JoinedStore(store, ToyTokens(refs))), refs


def train(loader: QueueDataLoader) -> list[TrainBatch]:
    """Take every batch; each step is whole."""
    batches = list(loader)
    assert not batches or batches[-1].ends_step
    return batches


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("ready", [None, 0, 1])
def test_every_whole_step_comes_in_order_and_every_lease_ends(stored, prefetch, ready):
    store, refs = stored
    source = ListedSteps(refs, ready)
    loader = QueueDataLoader(source, store, padded_steps(SIZE, 2), pad_collate, prefetch)
    batches = train(loader)
    assert [i for batch in batches for i in batch.sample_ids] == [f"s{number}" for number in range(12)]
    assert [batch.ends_step for batch in batches] == [False, True] * 3
    assert store.leased == 0


def test_it_waits_only_when_nothing_is_left_to_train_on(stored):
    store, refs = stored
    source = ListedSteps(refs, ready=1)
    batches = iter(QueueDataLoader(source, store, padded_steps(SIZE, 2), pad_collate, prefetch=9))
    for expected in ([], [], [1], [1], [1, 2]):
        next(batches)
        assert source.waited == expected


def refs_of(lengths: Sequence[int]) -> list[SampleRef]:
    return [SampleRef(f"s{n}", "", "", "", {}, {}, num_tokens=length) for n, length in enumerate(lengths)]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_padded_steps_are_those_of_a_planned_training(world, micro_batch_size, accumulation):
    size = world * micro_batch_size * accumulation
    for rank in range(world):
        planned = PaddedTrainSchedule(
            samples=size, global_batch_size=size, micro_batch_size=micro_batch_size, rank=rank, world=world
        )
        split = padded_steps(size, micro_batch_size, rank, world)
        assert split(refs_of([1] * size)) == planned.split_step(np.arange(size))


@given(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=3, max_size=9))
def test_packed_steps_are_those_of_a_planned_training(world, lengths):
    size, batches = len(lengths), []
    for rank in range(world):
        planned = PackedTrainSchedule(
            samples=size, lengths=tuple(lengths), pack_tokens=10, global_batch_size=size, rank=rank, world=world
        )
        batches.append(packed_steps(size, PackLimits(10), rank, world)(refs_of(lengths)))
        assert batches[-1] == planned.split_step(np.arange(size))
    assert len({len(mine) for mine in batches}) == 1
    taken = [index for mine in batches for batch in mine if not batch.padding for index in batch.indices]
    assert sorted(taken) == list(range(size))


def test_packed_rows_are_read_as_documents(stored):
    store, refs = stored

    def pack(samples, ids) -> TrainBatch:
        return TrainBatch({"last": torch.cat([sample["last"] for sample in samples])}, tuple(ids))

    loader = QueueDataLoader(ListedSteps(refs), store, packed_steps(SIZE, PackLimits(14)), pack)
    tokens = {ref.sample_id: ref.num_tokens for ref in refs}
    batches = train(loader)
    for batch in batches:
        assert len(batch["last"]) == batch.num_tokens == sum(tokens[i] for i in batch.sample_ids) <= 14
    assert sorted(i for batch in batches for i in batch.sample_ids) == sorted(f"s{number}" for number in range(12))


def test_what_cannot_be_split_is_refused_at_once():
    with pytest.raises(ConfigError, match="not a multiple"):
        padded_steps(SIZE, 3)
    with pytest.raises(ConfigError, match="less than a sample each"):
        packed_steps(2, PackLimits(10), world=3)
    with pytest.raises(DataError, match="do not fit into a row"):
        packed_steps(2, PackLimits(10))(refs_of([3, 11]))


def test_a_stream_has_one_epoch_and_is_not_skipped(stored):
    store, refs = stored
    loader = QueueDataLoader(ListedSteps(refs, start=2), store, padded_steps(SIZE, 2), pad_collate)
    loader.set_epoch(0)
    loader.seek(2)
    with pytest.raises(ValueError, match="continues after step 2"):
        loader.seek(0)
    with pytest.raises(ValueError, match="one epoch"):
        loader.set_epoch(1)
    assert [i for batch in train(loader) for i in batch.sample_ids] == [f"s{number}" for number in range(8, 12)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_name_the_sample_and_leave_no_lease(stored, prefetch):
    store, refs = stored
    store.fail_on = "s5"
    loader = QueueDataLoader(ListedSteps(refs), store, padded_steps(SIZE, 2), pad_collate, prefetch)
    with pytest.raises(RuntimeError, match="sample s5: OSError: the disk is gone"):
        train(loader)
    assert store.leased == 0


def test_a_failing_source_ends_the_iteration(stored):
    store, refs = stored
    source = ListedSteps(refs, ready=1)

    def fail(wait: bool = True):
        raise StoreError("the producer died")

    batches = iter(QueueDataLoader(source, store, padded_steps(SIZE, 2), pad_collate, prefetch=1))
    next(batches)
    source.next_step = fail  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="the producer died"):
        list(batches)
