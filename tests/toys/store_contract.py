"""What every feature store promises: a subclass gives the fixture `harness`, and is asked according to its traits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from features_toys import toy_ref, toy_tensors
from kill_points import killed_before
from store_harness import FileHarness, StoreHarness, kill_at_work, publish, put, run_elsewhere
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.features.contracts import (
    FeatureHandle,
    FeatureSpec,
    FeatureStore,
    KeyedFeatureStore,
    SampleRef,
    assert_no_tensors,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]
MAX_CHANGES = 400
"""Uses of the file system by one put, at most."""


def read(harness: StoreHarness, store: FeatureStore, ref: SampleRef, plus: float = 0.0) -> FeatureHandle:
    """Get a toy sample and check all of it; return the lease."""
    tensors, handle = store.get(ref)
    assert tensors.keys() == ref.feature_keys.keys() | harness.adds
    expected = toy_tensors(replace(ref, feature_keys=toy_ref(int(ref.sample_id[1:])).feature_keys))
    assert all(torch.equal(tensors[name], expected[name] + plus) for name in ref.feature_keys)
    assert handle.sample_id == ref.sample_id
    return handle


class ReadingContract:
    """Promises of stores that are read: all of them."""

    @pytest.fixture
    def store(self, harness: StoreHarness) -> Iterator[FeatureStore]:
        opened = harness.open()
        yield opened
        if isinstance(opened, KeyedFeatureStore):
            opened.close()

    def test_stored_samples_are_read(self, harness: StoreHarness):
        refs = [harness.fill(index) for index in range(3)]
        store = harness.open()
        for ref in refs:
            assert_no_tensors(ref)
            handle = read(harness, store, SampleRef.from_json(ref.to_json()))
            assert_no_tensors(handle)

    def test_selected_features_alone_are_read(self, harness: StoreHarness):
        ref = harness.fill(1)
        read(harness, harness.open(), ref.select(("last",)))

    def test_an_absent_sample_is_named(self, harness: StoreHarness):
        ref = harness.fill(1)
        absent = replace(toy_ref(2), feature_store_uri=ref.feature_store_uri)
        with pytest.raises(StoreError, match="sample s2"):
            harness.open().get(absent)

    @pytest.mark.parametrize("wrong", [FeatureSpec("last", (99, 4), "float32"), FeatureSpec("last", (4, 4), "int32")])
    def test_another_shape_or_dtype_than_the_ref_says_is_refused(self, harness: StoreHarness, wrong: FeatureSpec):
        ref, store = harness.fill(1), harness.open()
        with pytest.raises(
            StoreError, match=rf"sample s1.*feature last.*expected.*{wrong.shape[0]}, 4\) of {wrong.dtype}"
        ):
            store.get(replace(ref, feature_specs={**ref.feature_specs, "last": wrong}))
        assert store.health()["leases"] == 0

    @pytest.mark.parametrize("damage", ["alter", "truncate"])
    def test_a_damaged_tensor_is_never_read(self, harness: StoreHarness, damage: str):
        ref, other = harness.fill(1), harness.fill(2)
        getattr(harness, damage)(toy_tensors(ref)["last"])
        store = harness.open()
        with pytest.raises(StoreError, match="sample s1"):
            store.get(ref)
        assert store.health()["leases"] == 0
        read(harness, store, other)

    def test_leases_are_counted_and_end_once(self, harness: StoreHarness):
        ref, store = harness.fill(1), harness.open()
        one, two = read(harness, store, ref), read(harness, store, ref)
        assert one.lease_token != two.lease_token
        assert store.health()["leases"] == 2
        for _ in range(2):
            store.release(one)
            store.release(replace(two, lease_token="another process's"))
            assert store.health()["leases"] == 1
        read(harness, store, ref)
        store.release(two)
        assert store.health()["leases"] == 1

    def test_tensors_outlive_their_lease_unless_they_are_bound_to_it(self, harness: StoreHarness):
        ref, store = harness.fill(1), harness.open()
        tensors, handle = store.get(ref)
        if store.lease_bound:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        store.release(handle)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in toy_tensors(toy_ref(1)).items())

    def test_the_last_release_frees_nothing(self, harness: StoreHarness):
        ref, store = harness.fill(1), harness.open()
        store.release(read(harness, store, ref))
        for reader in (store, harness.open()):
            reader.release(read(harness, reader, ref))
        assert harness.stored_bytes() > 0

    def test_leases_held_too_long_are_dropped_and_their_release_does_nothing(self, harness: StoreHarness):
        ref, store = harness.fill(1), harness.open(max_hold_age_s=0.0)
        handle = read(harness, store, ref)
        while store.health()["leases"]:
            store.gc()
        store.release(handle)
        read(harness, store, ref)
        assert store.health()["leases"] == 1

    def test_health_is_plain_data(self, harness: StoreHarness):
        harness.fill(1)
        health = harness.open().health()
        assert json.loads(json.dumps(health)) == health

    def test_another_process_reads_it_or_is_refused(self, harness: StoreHarness):
        ref = harness.fill(1)
        answer = run_elsewhere(harness, _consume, ref.to_json())
        if harness.shared:
            assert answer == "read"
        else:
            assert answer.startswith("StoreError: sample s1")
        read(harness, harness.open(), ref)

    def test_a_reader_killed_under_lease_takes_nothing_along(self, harness: StoreHarness):
        ref = harness.fill(1)
        if harness.shared:
            assert kill_at_work(harness, _Hold(ref.to_json()), after=1, wait_s=0.0) == ["held"]
        harness.open().gc()
        read(harness, harness.open(), ref)

    def test_threads_read_what_one_would(self, harness: StoreHarness):
        refs = [harness.fill(index) for index in range(8)]
        store = harness.open()
        with ThreadPoolExecutor(4) as pool:
            handles = list(pool.map(lambda ref: read(harness, store, ref), refs * 4))
        assert store.health()["leases"] == len(handles) == 32
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(store.release, handles))
        assert store.health()["leases"] == 0


class WritingContract(ReadingContract):
    """Promises of stores that are written to as well."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_round_trip_keeps_every_bit(self, harness: StoreHarness, store: FeatureStore, dtype: torch.dtype):
        tensors = toy_tensors(toy_ref(1), dtype)
        ref = publish(store, toy_ref(1), tensors)
        for reader in (store, harness.open()):
            found, _ = reader.get(ref)
            assert {name: (found[name].dtype, found[name].double().tolist()) for name in tensors} == {
                name: (dtype, tensor.double().tolist()) for name, tensor in tensors.items()
            }

    def test_put_fills_in_the_ref(self, harness: StoreHarness, store: FeatureStore):
        said = FeatureSpec("last", (), "float32", target_repr="hidden_state", target_meta={"norm": "final"})
        ref = store.put(replace(toy_ref(1), feature_specs={"last": said}), toy_tensors(toy_ref(1)))
        assert ref.feature_store_uri
        assert ref.feature_specs == {
            "hf2": FeatureSpec("hf2", (4, 4), "float32"),
            "last": replace(said, shape=(4, 4)),
        }
        assert ref.estimated_bytes == store.estimate_bytes(ref) == 2 * 4 * 4 * 4
        assert ref.feature_keys == toy_ref(1).feature_keys

    def test_views_empty_and_scalar_tensors_come_back_or_are_refused(self, harness: StoreHarness, store: FeatureStore):
        table = torch.arange(16.0).reshape(4, 4)
        tensors = {"left": table[:, :3], "turned": table.T}
        if not harness.one_row_per_token:
            tensors |= {"none": table[:0], "scalar": torch.tensor(True)}
        ref = _with_keys(toy_ref(1), tensors)
        stored = publish(store, ref, tensors)
        found, _ = harness.open().get(stored)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        if harness.one_row_per_token:
            for odd in (table[:0], torch.tensor(True)):
                bad = publish(store, _with_keys(toy_ref(1), {"odd": odd}), {"odd": odd})
                with pytest.raises(StoreError, match="sample s1, feature odd"):
                    store.get(bad)

    def test_what_the_caller_does_with_its_tensors_afterwards_changes_nothing(
        self, harness: StoreHarness, store: FeatureStore
    ):
        tensors = toy_tensors(toy_ref(1))
        ref = store.put(toy_ref(1), tensors)
        for tensor in tensors.values():
            tensor.zero_()
        read(harness, store, ref)

    def test_putting_again_stores_nothing(self, harness: StoreHarness, store: FeatureStore):
        first = put(store, 1)
        size = harness.stored_bytes()
        assert put(store, 1, plus=1.0) == first
        for reader in (store, harness.open()):
            read(harness, reader, first)
        assert harness.stored_bytes() == size

    def test_a_stale_handle_releases_nothing(self, harness: StoreHarness, store: FeatureStore):
        ref = put(store, 1)
        old = read(harness, store, ref)
        store.abort("s1")
        read(harness, store, ref)
        before = store.health()
        store.release(old)
        assert store.health() == before
        read(harness, store, ref)

    def test_abort_under_lease_keeps_what_is_published(self, harness: StoreHarness, store: FeatureStore):
        ref, other = put(store, 1), put(store, 2)
        handle = read(harness, store, ref)
        store.abort("s1")
        store.abort("s7")
        store.release(handle)
        read(harness, store, other)
        read(harness, store, ref)

    def test_gc_frees_nothing_that_can_be_read(self, harness: StoreHarness, store: FeatureStore):
        ref = put(store, 1)
        assert store.gc() == 0
        read(harness, store, ref)

    def test_another_process_puts_what_this_one_reads(self, harness: StoreHarness, store: FeatureStore):
        if not harness.shared:
            return None
        ref = SampleRef.from_json(run_elsewhere(harness, _put))
        if isinstance(store, KeyedFeatureStore):
            store.refresh()
        read(harness, store, ref)

    def test_a_writer_killed_at_any_time_leaves_whole_samples_or_none(self, harness: StoreHarness):
        if not harness.shared:
            return
        kept = harness.fill(0)
        for attempt in range(2):
            wait_s = random.Random(attempt).uniform(0.0, 0.03)
            refs = [SampleRef.from_json(text) for text in kill_at_work(harness, _put_on, after=2, wait_s=wait_s)]
            store = harness.open()
            for ref in [kept, *{ref.sample_id: ref for ref in refs}.values()]:
                read(harness, store, ref)
            for index in range(1, 4):
                read(harness, store, put(store, index))
            store.gc()
            assert harness.leftovers() == []

    def test_a_writer_killed_before_any_change_of_files_leaves_whole_samples_or_none(self, harness: StoreHarness):
        if not isinstance(harness, FileHarness):
            return
        kept, first = harness.fill(0), harness.fill(1)
        for event in range(MAX_CHANGES):
            new = toy_ref(10 + event)
            killed = killed_before(event, partial(_put_two, harness.open(), 10 + event, 1))
            store = harness.open()
            read(harness, store, kept)
            read(harness, store, first)
            if isinstance(store, KeyedFeatureStore):
                require_whole_or_missing(harness, store, new)
            read(harness, store, put(store, 10 + event))
            first = put(store, 1)
            read(harness, store, first)
            store.gc()
            assert harness.leftovers() == []
            if not killed:
                return
        raise AssertionError("it never came to its end")

    def test_threads_that_put_and_consume_agree(self, harness: StoreHarness, store: FeatureStore):
        def turn(index: int) -> None:
            for _ in range(3):
                store.release(read(harness, store, put(store, index)))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(turn, range(8)))
        assert store.health()["leases"] == 0


class _Hold:
    """Gets a sample and holds it until it is killed."""

    def __init__(self, ref: str) -> None:
        self.ref = ref

    def __call__(self, harness: StoreHarness, send: Callable[[str], None]) -> None:
        store = harness.open()
        handle = read(harness, store, SampleRef.from_json(self.ref))
        send("held")
        while handle:
            store.health()


def _consume(harness: StoreHarness, ref: str) -> str:
    store = harness.open()
    try:
        store.release(read(harness, store, SampleRef.from_json(ref)))
    except StoreError as error:
        return f"StoreError: {error}"
    return "read"


def _put(harness: StoreHarness) -> str:
    return put(harness.open(), 1).to_json()


def _put_two(store: FeatureStore, one: int, two: int) -> None:
    put(store, one)
    put(store, two)


def require_whole_or_missing(harness: StoreHarness, store: KeyedFeatureStore, ref: SampleRef) -> None:
    missing = store.find_missing(ref.feature_keys.values())
    for name, key in ref.feature_keys.items():
        one = replace(ref, feature_keys={name: key}, feature_specs={})
        if key in missing:
            with pytest.raises(StoreError, match=f"sample {ref.sample_id}"):
                store.get(one)
        else:
            store.release(read(harness, store, one))


def _put_on(harness: StoreHarness, send: Callable[[str], None]) -> None:
    """Put three samples again and again, telling each when it is put."""
    store = harness.open()
    for count in range(10**6):
        send(put(store, count % 3 + 1).to_json())


def _with_keys(ref: SampleRef, tensors: dict[str, Tensor]) -> SampleRef:
    keys = {name: f"{number:032x}" for number, name in enumerate(tensors)}
    return replace(ref, feature_keys=keys, feature_specs={})
