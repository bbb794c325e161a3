"""The loader: what it yields, what it reads, how it ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from features_toys import CountingStore, ToyTokens, filled_store, pad_collate, toy_tensors

from draftworks.errors import StoreError
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.wrapped_store import JoinedStore


@pytest.fixture
def counting(tmp_path: Path):
    store, refs = filled_store(tmp_path, 13)
    return CountingStore(JoinedStore(store, ToyTokens(refs))), refs


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("feature-loader")]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_hold_the_samples_features(counting, prefetch):
    store, refs = counting
    loader = FeatureDataLoader.for_training(refs, store, 2, pad_collate, seed=3, prefetch=prefetch)
    batches = list(loader)
    assert len(batches) == loader.schedule.steps == 6
    for batch in batches:
        for row, sample_id in enumerate(batch.sample_ids):
            ref = next(ref for ref in refs if ref.sample_id == sample_id)
            assert torch.equal(batch["last"][row, : ref.num_tokens], toy_tensors(ref)["last"])
        assert batch.num_tokens == int(batch["loss_mask"].sum())
    assert store.leased == 0


def test_prefetching_changes_nothing(counting):
    store, refs = counting
    plans = [
        [b.sample_ids for b in FeatureDataLoader.for_training(refs, store, 2, pad_collate, prefetch=n)] for n in (0, 4)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("place", "bound"), [("cuda:3", 3), ("cuda", 5)])
def test_for_a_gpu_batches_are_pinned_ahead_by_a_thread_bound_to_it(counting, monkeypatch, place, bound):
    """Of CUDA only its part is played: what would be pinned is doubled here."""
    store, refs = counting
    seen = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(threading.current_thread().name)
        return tensor * 2

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.append(index))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    loader = FeatureDataLoader.for_evaluation(refs, store, 2, pad_collate)
    plain = list(loader)
    assert seen == []
    loader.prepare_for(torch.device(place))
    batches = list(loader)
    assert seen[0] == bound
    assert set(seen[1:]) == {"feature-loader_0"}
    assert [b.sample_ids for b in batches] == [b.sample_ids for b in plain]
    for batch, other in zip(batches, plain):
        assert all(torch.equal(batch[name], 2 * tensor) for name, tensor in other.tensors.items())


@pytest.mark.parametrize("skip", [0, 1, 4, 6])
def test_seek_equals_skipping_and_reads_nothing_of_the_skipped(counting, skip):
    store, refs = counting
    loader = FeatureDataLoader.for_training(refs, store, 2, pad_collate)
    whole = [batch.sample_ids for batch in loader]
    store.fetched.clear()
    loader.seek(skip)
    assert store.fetched == []
    assert [batch.sample_ids for batch in loader] == whole[skip:]
    assert sorted(store.fetched) == sorted(i for ids in whole[skip:] for i in ids)
    assert [batch.sample_ids for batch in loader] == whole


@pytest.mark.parametrize("position", [-1, 7])
def test_seek_outside_the_epoch_is_refused(counting, position):
    store, refs = counting
    with pytest.raises(ValueError, match="an epoch has 6 steps"):
        FeatureDataLoader.for_training(refs, store, 2, pad_collate).seek(position)


def test_epochs_differ(counting):
    store, refs = counting
    loader = FeatureDataLoader.for_training(refs, store, 2, pad_collate)
    first = [batch.sample_ids for batch in loader]
    loader.set_epoch(1)
    assert [batch.sample_ids for batch in loader] != first


@pytest.mark.parametrize("world", [1, 2, 5])
def test_evaluation_sees_every_sample_once_and_padding_adds_nothing(counting, world):
    store, refs = counting
    loaders = [
        FeatureDataLoader.for_evaluation(refs, store, 3, pad_collate, rank=rank, world=world) for rank in range(world)
    ]
    per_rank = [list(loader) for loader in loaders]
    assert len({len(batches) for batches in per_rank}) == 1
    seen = [i for batches in per_rank for batch in batches for i in batch.sample_ids]
    assert sorted(seen) == sorted(ref.sample_id for ref in refs)
    padding = [batch for batches in per_rank for batch in batches if not batch.sample_ids]
    assert all(not batch["loss_mask"].any() and batch.num_tokens == 0 for batch in padding)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_name_the_sample_and_leave_no_thread(counting, prefetch):
    store, refs = counting
    store.fail_on = "s5"
    with pytest.raises(RuntimeError, match="sample s5: OSError: the disk is gone"):
        list(FeatureDataLoader.for_evaluation(refs, store, 2, pad_collate, prefetch=prefetch))
    assert loader_threads() == []


def test_store_errors_keep_their_type(tmp_path: Path):
    store, refs = filled_store(tmp_path, 4)
    loader = FeatureDataLoader.for_evaluation(refs, JoinedStore(store, ToyTokens(refs, extra=2)), 2, pad_collate)
    with pytest.raises(StoreError, match="sample s0"):
        list(loader)


def test_collation_errors_name_the_batch(counting):
    store, refs = counting

    def broken(samples, ids):
        raise KeyError("hf9")

    with pytest.raises(RuntimeError, match="batch of samples s0, s1: KeyError"):
        list(FeatureDataLoader.for_evaluation(refs, store, 2, broken))


def test_abandoned_iteration_leaves_no_thread(counting):
    store, refs = counting
    for _ in FeatureDataLoader.for_evaluation(refs, store, 1, pad_collate, prefetch=3):
        break
    assert loader_threads() == []
    assert store.leased == 0
    assert len(store.fetched) <= 5


def test_prefetch_is_bounded(counting):
    store, refs = counting
    iterator = iter(FeatureDataLoader.for_evaluation(refs, store, 1, pad_collate, prefetch=2))
    next(iterator)
    iterator.close()
    assert len(store.fetched) <= 3
