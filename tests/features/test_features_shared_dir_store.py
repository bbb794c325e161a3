"""The shared folder as a feature store: the newest generation or an error, leases, consume-once or retained."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from features_toys import ToyTokens, pad_collate, toy_ref, toy_tensors
from shared_dir_toys import file_of, generation, put

from draftworks.errors import StoreError
from draftworks.features.joined_store import JoinedStore
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.shared_dir_store import SharedDirFeatureStore


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_selected_features_alone_are_read(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path, retain_on_release=True)
    ref = put(store, 1)
    path = file_of(tmp_path)
    content = bytearray(path.read_bytes())
    hf2 = toy_tensors(ref)["hf2"].numpy().tobytes()
    content[content.index(hf2)] ^= 1
    path.write_bytes(content)
    assert list(store.get(ref.select(("last",)))[0]) == ["last"]
    with pytest.raises(StoreError, match="tensor hf2, is altered"):
        store.get(ref)


def test_behind_joined_store_and_loader_it_is_a_feature_store_like_any(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path)
    refs = [put(store, index) for index in range(7)]
    loader = FeatureDataLoader.for_training(refs, JoinedStore(store, ToyTokens(refs)), 2, pad_collate, seed=1)
    batches = list(loader)
    assert {name for batch in batches for name in batch.sample_ids} <= {ref.sample_id for ref in refs}
    assert batches[0].tensors.keys() == {"input_ids", "loss_mask", "hf2", "last"}
    assert store.health()["samples"] == 7 - sum(len(batch.sample_ids) for batch in batches)
    assert store.health()["leases"] == 0


def test_a_sample_is_put_whole(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path)
    with pytest.raises(StoreError, match=r"expected the features \['hf2', 'last'\] at once.*found \['last'\]"):
        store.put(toy_ref(1), {"last": toy_tensors(toy_ref(1))["last"]})
    assert store.health()["samples"] == store.health()["staging_files"] == 0


def test_putting_again_raises_the_generation_and_supersedes(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path, retain_on_release=True)
    first, second = put(store, 1), put(store, 1, plus=1.0)
    assert generation(second) > generation(first)
    assert store.health()["samples"] == 1
    assert torch.equal(store.get(second)[0]["last"], toy_tensors(second)["last"] + 1)
    with pytest.raises(
        StoreError, match=f"s1: generation {generation(first)} .* is superseded by generation {generation(second)}"
    ):
        SharedDirFeatureStore(tmp_path).get(first)


def test_a_generation_left_behind_by_a_crash_is_superseded_and_never_comes_back(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path)
    first = put(store, 1)
    path = file_of(tmp_path)
    content = path.read_bytes()
    second = put(store, 1)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="superseded"):
        store.get(first)
    store.release(store.get(second)[1])
    with pytest.raises(StoreError, match="gone"):
        store.get(first)


def test_consume_once_frees_on_the_last_release_of_this_process(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path)
    ref = put(store, 1)
    (tensors, one), (_, two) = store.get(ref), store.get(ref)
    store.release(one)
    store.release(one)
    assert store.health() | {"samples": 1, "leases": 1} == store.health()
    store.release(two)
    assert store.health()["samples"] == 0
    with pytest.raises(StoreError, match="sample s1: .* is gone .*: released for the last time"):
        store.get(ref)
    assert torch.equal(tensors["last"], toy_tensors(ref)["last"])
    assert generation(put(store, 1)) > generation(ref)
    with pytest.raises(StoreError, match="superseded"):
        store.get(ref)


def test_abort_fails_a_put_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = SharedDirFeatureStore(tmp_path)
    monkeypatch.setattr("draftworks.features.shared_dir_store.fsync", lambda path: store.abort("s1"))
    with pytest.raises(StoreError, match="s1 was aborted while it was being put"):
        put(store, 1)
    assert store.health() | {"samples": 0, "staging_files": 0} == store.health()


@pytest.mark.parametrize("key", ["../../../etc/passwd", "/etc/passwd", "", "x.g1.safetensors/last", "{file}x/last"])
def test_hostile_keys_open_nothing(tmp_path: Path, key: str):
    store = SharedDirFeatureStore(tmp_path)
    ref = put(store, 1).select(("last",))
    hostile = key.format(file=ref.feature_keys["last"].partition("/")[0])
    with pytest.raises(StoreError, match="sample s1: expected feature keys of one file of this sample"):
        store.get(replace(ref, feature_keys={"last": hostile}))


def test_a_ref_reads_its_own_sample_only(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path / "one")
    mine, theirs = put(store, 1), put(store, 2)
    with pytest.raises(StoreError, match="s1: expected feature keys of one file of this sample"):
        store.get(replace(mine, feature_keys=theirs.feature_keys))
    with pytest.raises(StoreError, match="s1: .* has no feature hf9, it has"):
        store.get(replace(mine, feature_keys={"hf9": mine.feature_keys["last"].replace("last", "hf9")}))
    with pytest.raises(StoreError, match=f"s1 is in the store {store.uri}, expected disagg://"):
        SharedDirFeatureStore(tmp_path / "two").get(mine)


def test_gc_removes_old_staging_and_leaves_young(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path, staging_age_s=100.0)
    for name, seconds in (("old.tmp", 101.0), ("young.tmp", 50.0)):
        (tmp_path / "staging" / name).write_bytes(b"12345")
        age(tmp_path / "staging" / name, seconds)
    assert store.gc() == 5
    assert [path.name for path in (tmp_path / "staging").iterdir()] == ["young.tmp"]


def test_gc_removes_expired_samples_that_are_not_leased(tmp_path: Path):
    store = SharedDirFeatureStore(tmp_path, retain_on_release=True, max_sample_age_s=100.0)
    refs = [put(store, index) for index in range(3)]
    for path in (tmp_path / "samples").glob("*/*"):
        age(path, 50.0 if path.name in refs[0].feature_keys["last"] else 101.0)
    _, handle = store.get(refs[1])
    assert SharedDirFeatureStore(tmp_path).gc() == 0
    assert store.gc() > 0
    assert store.get(refs[0])
    assert store.get(refs[1])
    with pytest.raises(StoreError, match="s2: .*gone"):
        store.get(refs[2])
