"""A stored feature set is listed without its features."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from features_toys import filled_store

from draftworks.errors import StoreError
from draftworks.features.contracts import assert_no_tensors
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import MANIFEST, FeatureSetIdentity, OfflineManifestReader, write_feature_set


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store, refs = filled_store(tmp_path / "store", 4)
    write_feature_set(tmp_path / "set", refs, FeatureSetIdentity(target="abc"), ("hf2", "last"), store.uri)
    return tmp_path / "set"


def test_refs_are_listed_though_the_store_is_gone(folder: Path):
    shutil.rmtree(folder.parent / "store")
    refs = OfflineManifestReader(folder, run_id="night", strategy="eagle3").read()
    assert_no_tensors(refs)
    assert [ref.sample_id for ref in refs] == ["s0", "s1", "s2", "s3"]
    assert [ref.source_task_id for ref in refs] == [f"night:0000000{index}" for index in range(4)]
    assert {(ref.run_id, ref.strategy) for ref in refs} == {("night", "eagle3")}
    assert all(ref.feature_specs.keys() == ref.feature_keys.keys() == {"hf2", "last"} for ref in refs)


def test_refs_are_read_from_the_store_that_they_name(folder: Path):
    refs = OfflineManifestReader(folder, streams=("last",)).read()
    store = LocalFeatureStore(folder.parent / "store")
    assert {ref.feature_store_uri for ref in refs} == {store.uri}
    for ref in refs:
        tensors, handle = store.get(ref)
        assert tensors.keys() == {"last"}
        store.release(handle)


def test_a_stream_that_was_not_captured_is_an_error(folder: Path):
    with pytest.raises(
        StoreError, match=r"set has no streams \['hf9'\], it has \['hf2', 'last'\].* for strategy eagle3"
    ):
        OfflineManifestReader(folder, strategy="eagle3", streams=("hf2", "hf9")).read()


def test_a_damaged_set_is_an_error(folder: Path):
    (folder / MANIFEST).unlink()
    with pytest.raises(StoreError, match="no feature set in"):
        OfflineManifestReader(folder).read()
