"""Journals of freed keys: torn lines, orphans, the lock; and random puts and frees against a model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from features_toys import filled_store, toy_ref, toy_tensors
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from store_contract import read
from store_harness import FileHarness

from draftworks.errors import StoreError
from draftworks.features import freed_keys
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.local_store import LocalFeatureStore
from draftworks.storage.file_lock import try_lock


def keys_of(index: int) -> list[str]:
    return list(toy_ref(index).feature_keys.values())


def journal_in(root: Path) -> Path:
    (path,) = (root / "shards").glob("*.freed")
    return path


def test_a_store_where_nothing_was_freed_has_no_other_files_than_before(tmp_path: Path):
    store, _ = filled_store(tmp_path, 2)
    store.gc()
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors"}


def test_a_torn_line_frees_nothing_and_spoils_nothing(tmp_path: Path):
    store, _ = filled_store(tmp_path, 3)
    (one, two), three = keys_of(0), keys_of(1)[0]
    store.free([one])
    with journal_in(tmp_path).open("a") as stream:
        stream.write(two[:-3])
    assert LocalFeatureStore(tmp_path).find_missing([one, two, three]) == [one]
    store.free([three])
    assert LocalFeatureStore(tmp_path).find_missing([one, two, three]) == [one, three]


def test_a_journal_that_is_no_text_frees_nothing(tmp_path: Path):
    store, _ = filled_store(tmp_path, 2)
    store.free(keys_of(0))
    journal_in(tmp_path).write_bytes(b"\xff\x00" * 50)
    store.refresh()
    assert store.find_missing([*keys_of(0), *keys_of(1)]) == []


def test_gc_removes_journals_without_shards_and_shards_without_keys(tmp_path: Path):
    store, _ = filled_store(tmp_path, 1)
    size = next((tmp_path / "shards").iterdir()).stat().st_size
    freed_keys.FreedKeys(tmp_path / "shards").record(next((tmp_path / "shards").iterdir()), keys_of(0))
    (tmp_path / "shards" / "orphan.freed").write_text("x\n")
    assert LocalFeatureStore(tmp_path).gc() == size
    assert list((tmp_path / "shards").iterdir()) == []
    store.refresh()
    assert store.health()["tensors"] == 0


def test_a_shard_under_an_orphaned_journal_is_whole(tmp_path: Path):
    """As a process leaves it that is killed between the removals of a shard and of its journal."""
    store, refs = filled_store(tmp_path, 1)
    shard = next((tmp_path / "shards").iterdir())
    store.free(keys_of(0))
    shard.with_suffix(".freed").write_text("\n".join(keys_of(0)) + "\n")
    store.put(refs[0], toy_tensors(refs[0]))
    store.flush()
    assert shard.exists()
    assert LocalFeatureStore(tmp_path).find_missing(keys_of(0)) == []


def test_health_tells_freed_bytes_whose_shard_is_still_there(tmp_path: Path):
    store, refs = filled_store(tmp_path, 2)
    store.free(keys_of(0))
    assert store.health()["freed_bytes"] == refs[0].estimated_bytes
    store.free(keys_of(1))
    assert store.health() | {"freed_bytes": 0, "shards": 0, "bytes": 0} == store.health()


def test_a_key_in_several_shards_is_freed_from_all(tmp_path: Path):
    stores = [LocalFeatureStore(tmp_path) for _ in range(2)]
    for number, store in enumerate(stores):
        for index in (0, number + 1):
            store.put(toy_ref(index), toy_tensors(toy_ref(index)))
    for store in stores:
        store.flush()
    store = LocalFeatureStore(tmp_path)
    store.free(keys_of(0))
    for reader in (store, LocalFeatureStore(tmp_path)):
        assert reader.find_missing([*keys_of(0), *keys_of(1), *keys_of(2)]) == keys_of(0)


def test_one_copy_of_a_key_remains_when_the_other_shard_is_removed(tmp_path: Path):
    stores = [LocalFeatureStore(tmp_path) for _ in range(2)]
    for number, store in enumerate(stores):
        for index in (0, number + 1):
            store.put(toy_ref(index), toy_tensors(toy_ref(index)))
    for store in stores:
        store.flush()
    store = LocalFeatureStore(tmp_path)
    next((tmp_path / "shards").iterdir()).unlink()
    store.refresh()
    assert store.find_missing(keys_of(0)) == []


def test_a_lock_that_is_never_given_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(freed_keys, "LOCK_TIMEOUT_S", 0.05)
    store, _ = filled_store(tmp_path, 1)
    with try_lock(tmp_path / "freed.lock") as lease:
        assert lease is not None
        found = f"freed.lock was held by another process for 0.05 s: end process {os.getpid()} on "
        with pytest.raises(StoreError, match=found):
            store.free(keys_of(0))
    assert store.find_missing(keys_of(0)) == keys_of(0)
    assert store.gc() > 0


class FreeingMachine(RuleBasedStateMachine):
    """Two store objects on one folder, as of two processes; each reads what the other did before it acts."""

    leases = Bundle("leases")
    kind: Any = LocalFeatureStore
    buffers = True
    indices = st.integers(0, 3)
    sides = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.harness = FileHarness(Path(self.folder.name), lambda root, _: self.kind(root))
        self.stores = [self.open() for _ in range(2)]
        self.published: set[str] = set()
        self.buffered: list[set[str]] = [set(), set()]

    def open(self) -> KeyedFeatureStore:
        return self.kind(self.harness.root)

    def refreshed(self, side: int) -> KeyedFeatureStore:
        self.stores[side].refresh()
        return self.stores[side]

    @rule(side=sides, index=indices, names=st.sampled_from([("hf2",), ("last",), ("hf2", "last")]))
    def put(self, side: int, index: int, names: tuple[str, ...]):
        tensors = {name: tensor for name, tensor in toy_tensors(toy_ref(index)).items() if name in names}
        self.refreshed(side).put(toy_ref(index), tensors)
        keys = {toy_ref(index).feature_keys[name] for name in names}
        if self.buffers:
            self.buffered[side] |= keys - self.published
        else:
            self.published |= keys

    @rule(side=sides)
    def flush(self, side: int):
        self.stores[side].flush()
        self.published |= self.buffered[side]
        self.buffered[side] = set()

    @rule(side=sides, keys=st.sets(st.sampled_from([key for index in range(4) for key in keys_of(index)])))
    def free(self, side: int, keys: set[str]):
        self.refreshed(side).free(sorted(keys))
        self.published -= keys
        self.buffered[side] -= keys

    @rule(target=leases, side=sides, index=indices)
    def get(self, side: int, index: int):
        store, ref = self.refreshed(side), toy_ref(index)
        if self.published | self.buffered[side] >= set(keys_of(index)):
            return side, read(self.harness, store, ref)
        with pytest.raises(StoreError, match=f"sample s{index}"):
            store.get(ref)
        return multiple()

    @rule(lease=leases)
    def release(self, lease):
        side, handle = lease
        self.stores[side].release(handle)

    @rule(side=sides, index=indices)
    def abort(self, side: int, index: int):
        self.stores[side].abort(f"s{index}")
        self.buffered[side] -= set(keys_of(index))

    @rule(side=sides)
    def gc(self, side: int):
        self.refreshed(side).gc()

    @rule(side=sides)
    def restart(self, side: int):
        self.stores[side] = self.open()
        self.buffered[side] = set()

    @invariant()
    def what_is_published_is_found(self):
        every = [key for index in range(4) for key in keys_of(index)]
        assert self.open().find_missing(every) == [key for key in every if key not in self.published]

    def teardown(self) -> None:
        self.stores.clear()
        last = self.open()
        for index in range(4):
            last.free(keys_of(index))
        last.gc()
        assert not list(self.harness.root.rglob("*.safetensors")) + list(self.harness.root.rglob("*.freed"))
        self.folder.cleanup()


class SharedFreeingMachine(FreeingMachine):
    kind = KeyedSharedDirStore
    buffers = False


TestLocalFreeing = FreeingMachine.TestCase
TestSharedFreeing = SharedFreeingMachine.TestCase
