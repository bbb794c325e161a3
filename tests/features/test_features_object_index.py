"""The index of a store in object storage: one order of changes, read in few requests, whole after any kill."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from features_toys import toy_ref, toy_tensors
from obstore.store import MemoryStore
from store_harness import put
from store_keyed_contract import keys_of

from draftworks.errors import StoreError
from draftworks.features.object_feature_store import ObjectFeatureStore
from draftworks.features.object_shard import IndexChange, ObjectIndex, encode_shard, header_from_json, header_to_json
from draftworks.features.shards import read_header
from draftworks.storage.object_store import ObjectStore

KILL_POINTS = 40


class Watched(ObjectStore):
    """Counts the calls of all stores in `calls`, and breaks off before the n-th change of an object."""

    calls: Counter[str]
    changes_left = [-1]

    def inside(self, folder: str) -> ObjectStore:
        found = Watched(self._store, f"{self.url}/{folder}", f"{self._prefix}{folder}", 0)
        found.calls, found.changes_left = self.calls, self.changes_left
        return found

    def create(self, path: str, content: Any) -> bool:
        self._change("create")
        return super().create(path, content)

    def swap(self, path: str, content: bytes, seen: str | None) -> bool:
        self._change("swap")
        return super().swap(path, content, seen)

    def remove(self, paths: Any) -> None:
        for path in paths:
            self._change("remove")
            super().remove([path])

    def find(self, path: str) -> Any:
        self.calls["find"] += 1
        return super().find(path)

    def list(self, folder: str = "") -> Any:
        self.calls["list"] += 1
        return super().list(folder)

    def read_ranges(self, path: str, ranges: Any) -> list[Any]:
        self.calls["read_ranges"] += 1
        return super().read_ranges(path, ranges)

    def _change(self, name: str) -> None:
        self.calls[name] += 1
        if self.changes_left[0] == 0:
            raise KeyboardInterrupt
        self.changes_left[0] -= 1


@pytest.fixture
def objects() -> Watched:
    found = Watched(MemoryStore(), "s3://toys/features", "features", retry_s=0)
    found.calls, found.changes_left = Counter(), [-1]
    return found


def open_store(objects: ObjectStore) -> ObjectFeatureStore:
    return ObjectFeatureStore(objects, orphan_age_s=0.0, requests=1)


def make_change(index: int) -> IndexChange:
    return IndexChange(added=(encode_shard({f"{index:032x}": toy_tensors(toy_ref(index))["last"]}).header,))


def test_a_shard_is_a_file_as_a_local_store_has_them(tmp_path: Path):
    tensors = dict(zip(keys_of(1), toy_tensors(toy_ref(1)).values(), strict=True))
    shard = encode_shard(tensors)
    assert header_from_json(header_to_json(shard.header)) == shard.header
    path = tmp_path / f"{shard.header.digest}.safetensors"
    path.write_bytes(shard.content)
    header = read_header(path)
    assert {key: entry.checksum for key, entry in header.entries.items()} == {
        key: entry.checksum for key, entry in shard.header.entries.items()
    }
    assert header.expected_bytes == len(shard.content)


def test_writers_at_the_same_time_make_their_changes_one_after_the_other(objects: Watched):
    indexes = [ObjectIndex(objects) for _ in range(3)]
    for index in indexes:
        index.refresh()
    for number in range(9):
        indexes[number % 3].append(lambda number=number: make_change(number))
    for index in indexes:
        index.refresh()
        assert index.changes == 9
        assert index.shards.num_keys == 9


def test_a_change_whose_answer_was_lost_is_made_once(objects: Watched):
    index = ObjectIndex(objects)
    index.refresh()
    real = ObjectStore.create

    def create(path: str, content: bytes) -> bool:
        assert real(objects, path, content)
        return real(objects, path, content)  # asked again after a lost answer

    objects.create = create  # type: ignore[method-assign]
    index.append(lambda: make_change(1))
    assert index.changes == 1
    assert objects.find("index/0000000001.json") is None


def test_readers_begin_with_the_newest_summary(objects: Watched):
    index = ObjectIndex(objects, summary_after=4)
    index.refresh()
    for number in range(50):
        index.append(lambda number=number: make_change(number))
    index.append(lambda: IndexChange(freed={next(iter(index.shards.paths)): frozenset([f"{0:032x}"])}))
    reader = ObjectIndex(objects)
    objects.calls.clear()
    reader.refresh()
    assert reader.changes == 51
    assert (reader.shards.num_keys, reader.shards.freed) == (index.shards.num_keys, index.shards.freed)
    assert objects.calls["find"] < 51
    assert objects.calls["list"] == 0
    objects.calls.clear()
    reader.refresh()
    assert objects.calls == {"find": 1}


@pytest.mark.parametrize("name", ["index/head.json", "index/0000000004.json"])
def test_a_damaged_index_is_said(objects: Watched, name: str):
    index = ObjectIndex(objects, summary_after=4)
    index.refresh()
    for number in range(5):
        index.append(lambda number=number: make_change(number))
    content = objects.read(name).content
    objects.remove([name])
    objects.create(name, content.replace(b"1", b"2"))
    with pytest.raises(StoreError, match=f"s3://toys/features/{name} is damaged"):
        ObjectIndex(objects).refresh()


def test_reading_lists_nothing_and_asks_once_for_a_sample(objects: Watched):
    store = open_store(objects)
    refs = [store.put(toy_ref(index), toy_tensors(toy_ref(index))) for index in range(5)]
    store.close()
    objects.calls.clear()
    reader = open_store(objects)
    for ref in refs:
        reader.release(reader.get(ref)[1])
    assert objects.calls["list"] == 0
    assert objects.calls["read_ranges"] == 5
    assert objects.calls["find"] <= 20


def use(objects: Watched) -> None:
    """Put two samples and free one."""
    store = open_store(objects)
    put(store, 1)
    put(store, 2)
    store.free(keys_of(1))


def test_a_writer_killed_before_any_change_of_an_object_leaves_a_sound_store(objects: Watched):
    for changes in range(KILL_POINTS):
        objects.changes_left[0] = changes
        try:
            use(objects)
            done = True
        except KeyboardInterrupt:
            done = False
        objects.changes_left[0] = -1
        store = open_store(objects)
        for index in (1, 2):
            missing = store.find_missing(keys_of(index))
            assert missing in ([], keys_of(index))
            ref = store.put(toy_ref(index), toy_tensors(toy_ref(index)))
            store.flush()
            found, handle = store.get(ref)
            assert found["last"].tolist() == toy_tensors(toy_ref(index))["last"].tolist()
            store.release(handle)
        store.gc()
        named = {f"shards/{header.path.name}" for header in store._index.shards.headers}
        assert {each.path for each in objects.list("shards")} == named
        store.free(keys_of(1, 2))
        assert list(objects.list("shards")) == []
        if done:
            return
    raise AssertionError("it never came to its end")


def test_a_shard_that_somebody_deleted_is_missing_from_then_on(objects: Watched):
    store = open_store(objects)
    ref, other = put(store, 1), put(store, 2)
    lost = store._index.shards.holders(keys_of(1)[0])[0].path.name
    objects.remove([f"shards/{lost}"])
    reader = open_store(objects)
    with pytest.raises(
        StoreError, match="sample s1, feature .* is not in the feature store s3://toys/features. Capture"
    ):
        reader.get(ref)
    for each in (reader, open_store(objects)):
        assert each.find_missing(keys_of(1, 2)) == keys_of(1)
        each.release(each.get(other)[1])
