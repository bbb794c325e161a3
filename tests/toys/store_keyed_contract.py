"""What every store that finds features by content keys promises beyond the contract of all stores."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from features_toys import toy_ref, toy_tensors
from kill_points import killed_before
from store_contract import MAX_CHANGES, WritingContract, read, require_whole_or_missing
from store_harness import FileHarness, StoreHarness, put, run_elsewhere

from draftworks.errors import StoreError
from draftworks.features.contracts import KeyedFeatureStore


def keys_of(*indices: int) -> list[str]:
    return [key for index in indices for key in toy_ref(index).feature_keys.values()]


class KeyedContract(WritingContract):
    """Promises of stores with content keys."""

    def test_missing_keys_are_found_in_the_order_given(self, harness: StoreHarness, store: KeyedFeatureStore):
        wanted = [*keys_of(4, 1, 3), "f" * 32]
        assert store.find_missing(wanted) == wanted
        for index in (1, 2):
            put(store, index)
        for reader in (store, harness.open()):
            assert reader.find_missing(iter(wanted)) == [*keys_of(4, 3), "f" * 32]

    def test_missing_keys_of_many_are_those_of_few(self, harness: StoreHarness, store: KeyedFeatureStore):
        put(store, 1)
        many = [f"{number:032x}" for number in range(10**6, 10**6 + 3000)]
        assert store.find_missing([*many, *keys_of(1), "f" * 32]) == [*many, "f" * 32]

    def test_features_come_one_by_one(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref = toy_ref(1)
        for name, tensor in toy_tensors(ref).items():
            assert store.find_missing([ref.feature_keys[name]])
            ref = store.put(ref, {name: tensor})
        store.flush()
        read(harness, harness.open(), ref)

    def test_samples_with_equal_content_share_it(self, harness: StoreHarness, store: KeyedFeatureStore):
        first = put(store, 1)
        size = harness.stored_bytes()
        twin = store.put(replace(toy_ref(1), sample_id="twin"), toy_tensors(toy_ref(1)))
        store.flush()
        assert harness.stored_bytes() == size
        store.release(store.get(twin)[1])
        read(harness, store, first)

    def test_refresh_shows_what_others_put(self, harness: StoreHarness, store: KeyedFeatureStore):
        put(harness.open(), 1)
        store.refresh()
        assert store.find_missing(keys_of(1, 2)) == keys_of(2)


class FreeingContract(KeyedContract):
    """Promises of `free`."""

    def test_freed_keys_are_missing_and_the_others_are_not(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref, other = put(store, 1), put(store, 2)
        size = harness.stored_bytes()
        freed = store.free([*keys_of(1), "f" * 32])
        for reader in (store, harness.open()):
            assert reader.find_missing(keys_of(2, 1)) == keys_of(1)
            with pytest.raises(StoreError, match="sample s1"):
                reader.get(ref)
            read(harness, reader, other)
        assert freed == size - harness.stored_bytes()
        assert store.free(keys_of(1)) == 0

    def test_all_bytes_are_freed_with_the_last_key(self, harness: StoreHarness, store: KeyedFeatureStore):
        for index in range(3):
            put(store, index)
        size = harness.stored_bytes()
        assert sum(store.free([key]) for key in keys_of(2, 0, 1)) == size
        assert harness.stored_bytes() == 0
        assert harness.open().find_missing(keys_of(0, 1, 2)) == keys_of(0, 1, 2)

    def test_what_is_not_published_is_freed_too(self, harness: StoreHarness, store: KeyedFeatureStore):
        store.put(toy_ref(1), toy_tensors(toy_ref(1)))
        store.free(keys_of(1))
        assert store.find_missing(keys_of(1)) == keys_of(1)
        store.flush()
        assert harness.open().find_missing(keys_of(1)) == keys_of(1)

    def test_freed_keys_can_be_put_again(self, harness: StoreHarness, store: KeyedFeatureStore):
        put(store, 2)
        for _ in range(3):
            put(store, 1)
            store.free(keys_of(1))
            ref = put(store, 1)
            for reader in (store, harness.open()):
                assert reader.find_missing(keys_of(1, 2)) == []
                reader.release(read(harness, reader, ref))

    def test_one_feature_of_a_sample_can_be_freed(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref = put(store, 1)
        store.free([ref.feature_keys["hf2"]])
        for reader in (store, harness.open()):
            read(harness, reader, ref.select(("last",)))
            assert reader.find_missing(keys_of(1)) == [ref.feature_keys["hf2"]]
        put(store, 1)
        read(harness, harness.open(), ref)

    def test_what_is_leased_is_freed_with_its_last_lease(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref = put(store, 1)
        size = harness.stored_bytes()
        one, two = read(harness, store, ref), read(harness, store, ref)
        tensors, _ = store.get(ref.select(("last",)))
        assert store.free(keys_of(1)) == (0 if harness.defers else size)
        assert store.find_missing(keys_of(1)) == keys_of(1)
        with pytest.raises(StoreError, match="sample s1"):
            store.get(ref)
        store.release(one)
        store.release(one)
        assert harness.stored_bytes() == (size if harness.defers else 0)
        assert tensors["last"].tolist() == toy_tensors(toy_ref(1))["last"].tolist()
        store.release(two)
        assert (harness.stored_bytes() > 0) == harness.defers
        store.abort("s1")
        assert harness.stored_bytes() == 0

    def test_a_lease_held_too_long_defers_no_more(self, harness: StoreHarness):
        store = harness.open(max_hold_age_s=0.0)
        assert isinstance(store, KeyedFeatureStore)
        ref = put(store, 1)
        size = harness.stored_bytes()
        read(harness, store, ref)
        freed = store.free(keys_of(1))
        assert freed == (0 if harness.defers else size)
        while store.health()["leases"]:
            freed += store.gc()
        assert (freed, harness.stored_bytes()) == (size, 0)

    def test_what_is_put_again_under_a_lease_stays(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref = put(store, 1)
        handle = read(harness, store, ref)
        store.free(keys_of(1))
        put(store, 1)
        again = read(harness, store, ref)
        store.release(handle)
        store.release(again)
        for reader in (store, harness.open()):
            read(harness, reader, ref)
            assert reader.find_missing(keys_of(1)) == []

    def test_what_others_put_again_under_a_lease_stays(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref = put(store, 1)
        handle = read(harness, store, ref)
        store.free(keys_of(1))
        other = harness.open()
        assert isinstance(other, KeyedFeatureStore)
        assert other.find_missing(keys_of(1)) == keys_of(1)
        put(other, 1)
        store.release(handle)
        store.refresh()
        for reader in (store, other, harness.open()):
            read(harness, reader, ref)

    def test_another_process_frees_what_this_one_has_read(self, harness: StoreHarness, store: KeyedFeatureStore):
        if not harness.shared:
            return
        ref, other = put(store, 1), put(store, 2)
        tensors, handle = store.get(ref)
        assert int(run_elsewhere(harness, _free, keys_of(1))) > 0
        assert tensors["last"].tolist() == toy_tensors(toy_ref(1))["last"].tolist()
        store.refresh()
        assert store.find_missing(keys_of(1, 2)) == keys_of(1)
        with pytest.raises(StoreError, match="sample s1"):
            store.get(ref)
        store.release(handle)
        read(harness, store, other)
        put(store, 1)
        assert run_elsewhere(harness, _free, keys_of(1)) != "0"

    def test_of_two_that_free_a_part_each_the_later_frees_the_rest(
        self, harness: StoreHarness, store: KeyedFeatureStore
    ):
        put(store, 1)
        other = harness.open()
        assert isinstance(other, KeyedFeatureStore)
        one, two = keys_of(1)
        store.free([one])
        other.free([two])
        assert harness.stored_bytes() == 0

    def test_a_process_killed_while_it_frees_leaves_a_sound_store(self, harness: StoreHarness):
        if not isinstance(harness, FileHarness):
            return
        kept = harness.fill(0)
        for event in range(MAX_CHANGES):
            ref = harness.fill(1)
            killed = killed_before(event, lambda: _free(harness, keys_of(1)))
            store = harness.open()
            assert isinstance(store, KeyedFeatureStore)
            store.release(read(harness, store, kept))
            require_whole_or_missing(harness, store, ref)
            store.release(read(harness, store, put(store, 1)))
            store.free(keys_of(1))
            store.gc()
            assert harness.open().find_missing(keys_of(0, 1)) == keys_of(1)
            assert harness.leftovers() == []
            if not killed:
                store.free(keys_of(0))
                assert harness.stored_bytes() == 0
                return
        raise AssertionError("it never came to its end")


def _free(harness: StoreHarness, keys: list[str]) -> str:
    store = harness.open()
    assert isinstance(store, KeyedFeatureStore)
    return str(store.free(keys))


class PruningContract(FreeingContract):
    """Promises of stores that can tell what nobody uses."""

    def test_files_without_a_used_key_are_found_and_removed(self, harness: StoreHarness, store: KeyedFeatureStore):
        kept, gone = put(store, 1), put(store, 2)
        size = harness.stored_bytes()
        pruner = harness.open()
        used = set(keys_of(1))
        unused = pruner.find_unused(used)
        assert all(time.time() - 600 < file.written < time.time() + 600 for file in unused)
        assert sum(file.nbytes for file in unused) >= pruner.remove_files(unused) == size - harness.stored_bytes() > 0
        store.refresh()
        for reader in (store, pruner, harness.open()):
            assert reader.find_missing(keys_of(2, 1)) == keys_of(2)
            read(harness, reader, kept)
            with pytest.raises(StoreError):
                reader.get(gone)
        assert pruner.find_unused(used) == []
        assert pruner.find_unused({*keys_of(1), "f" * 32}) == []

    def test_one_used_key_keeps_what_cannot_go_without_it(self, harness: StoreHarness, store: KeyedFeatureStore):
        ref = put(store, 1)
        used = keys_of(1)[:1]
        store.remove_files(store.find_unused(set(used)))
        assert not set(used) & set(store.find_missing(ref.feature_keys.values()))
