"""A shared folder by content keys: what other machines do meanwhile, and what damage looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from features_toys import toy_ref, toy_tensors

from draftworks.errors import StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.shared_dir_store import SharedDirFeatureStore


def test_a_reader_goes_on_where_another_machine_puts_the_same_feature_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two that found a key missing both put it; the older file is gone when the reader opens it."""
    store, ref = KeyedSharedDirStore(tmp_path), toy_ref(1, ("last",))
    stored = store.put(ref, toy_tensors(ref))
    other, find = SharedDirFeatureStore(tmp_path, retain_on_release=True), SharedDirFeatureStore.find_newest_file
    seen: list[str | None] = []

    def overtaken(self: SharedDirFeatureStore, key: str) -> str | None:
        seen.append(find(self, key))
        if len(seen) == 1:
            sample = SampleRef(key, "", key, other.uri, {"feature": "feature"}, {})
            other.put(sample, {"feature": toy_tensors(ref)["last"]})
        return seen[-1]

    monkeypatch.setattr(SharedDirFeatureStore, "find_newest_file", overtaken)
    assert torch.equal(store.get(stored)[0]["last"], toy_tensors(ref)["last"])
    assert seen[0] != seen[-1]


def test_a_damaged_file_is_named_with_the_sample_it_is_of(tmp_path: Path):
    store, ref = KeyedSharedDirStore(tmp_path), toy_ref(1)
    store.put(ref, toy_tensors(ref))
    damaged = max((tmp_path / "samples").glob("*/*"))
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.raises(StoreError, match=rf"sample s1, feature .*{damaged.name} is truncated.* remove it and capture"):
        store.get(ref)
    damaged.unlink()
    assert len(store.find_missing(ref.feature_keys.values())) == 1
