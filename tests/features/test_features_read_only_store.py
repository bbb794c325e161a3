"""A read-only store refuses to write and changes no file, whatever is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from features_toys import filled_store, toy_ref, toy_tensors

from draftworks.errors import StoreError
from draftworks.features.wrapped_store import ReadOnlyFeatureStore


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]}


def test_put_and_abort_are_refused_and_nothing_changes(tmp_path: Path):
    root = tmp_path / "a store"
    writer, refs = filled_store(root, 3)
    writer.free(refs[0].feature_keys.values())
    (root / "staging").rmdir()
    before = tree(root)
    store = ReadOnlyFeatureStore(writer.uri)
    with pytest.raises(StoreError, match="sample s1 cannot be put into .*a%20store: it was opened to be read only"):
        store.put(toy_ref(1), toy_tensors(toy_ref(1)))
    with pytest.raises(StoreError, match="sample s1 cannot be aborted in"):
        store.abort("s1")
    store.release(store.get(refs[1])[1])
    with pytest.raises(StoreError, match="sample s0"):
        store.get(refs[0])
    assert store.gc() == 0
    assert store.estimate_bytes(refs[1]) == refs[1].estimated_bytes
    assert tree(root) == before


def test_what_is_put_later_is_read_after_refresh(tmp_path: Path):
    writer, _ = filled_store(tmp_path, 1)
    store = ReadOnlyFeatureStore(tmp_path.as_uri())
    ref = writer.put(toy_ref(1), toy_tensors(toy_ref(1)))
    writer.flush()
    store.refresh()
    assert store.get(ref)


@pytest.mark.parametrize("uri", ["", "disagg://x", "mem://x", "file://host/x", "file:relative", "/tmp"])
def test_other_addresses_are_refused(uri: str):
    with pytest.raises(StoreError, match="expected the address of a local feature store, file:///folder"):
        ReadOnlyFeatureStore(uri)


def test_a_folder_that_is_no_store_is_refused_and_not_made_one(tmp_path: Path):
    with pytest.raises(StoreError, match=r"expected a local feature store, found no folder .*/none/shards"):
        ReadOnlyFeatureStore((tmp_path / "none").as_uri())
    assert list(tmp_path.iterdir()) == []
