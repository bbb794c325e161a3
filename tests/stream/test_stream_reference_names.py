"""What SpecForge's DataFlow promises, by its names: a test for each claim that is not another test's already."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataflow_toys import ids_of, toy_slim_ref
from features_toys import toy_ref, toy_tensors
from store_kinds import open_keyed_store

from draftworks.errors import StoreError
from draftworks.stream import reference_names
from draftworks.stream.metadata_store import InFlight
from draftworks.stream.reference_names import (
    ConsumeOnceStore,
    DataFlowController,
    SampleRefQueue,
    SQLiteMetadataStore,
    StreamingRefChannel,
)


def open_channel(folder: Path, **options) -> StreamingRefChannel:
    controller = DataFlowController("run", SQLiteMetadataStore(folder / "control.sqlite"))
    return StreamingRefChannel(controller, **options)


def refs_of(names: str):
    return [toy_slim_ref(name) for name in names]


def test_every_name_is_importable_from_one_place():
    assert all(getattr(reference_names, name) is not None for name in reference_names.__all__)
    assert not [name for name in reference_names.__all__ if reference_names.__all__.count(name) > 1]


def test_what_is_published_is_polled_once_in_order_by_another_process(tmp_path: Path):
    assert open_channel(tmp_path).publish_batch(refs_of("abca")) == 3
    reader = open_channel(tmp_path)
    assert ids_of(reader.poll(2)) == ["a", "b"]
    open_channel(tmp_path).publish_batch(refs_of("bd"))
    assert ids_of(reader.poll()) == ["c", "d"]
    assert reader.poll(wait_s=0.0) == []


def test_in_flight_is_what_is_published_and_not_marked_consumed(tmp_path: Path):
    channel = open_channel(tmp_path)
    channel.publish_batch(refs := refs_of("abc"))
    channel.mark_consumed(["a", "b"])
    assert channel.in_flight_remote == InFlight(1, refs[2].estimated_bytes)
    with pytest.raises(StoreError, match="sample x cannot be acknowledged"):
        channel.mark_consumed(["x"])


def test_what_was_not_consumed_comes_again_after_a_restart_and_what_is_to_be_skipped_does_not(tmp_path: Path):
    channel = open_channel(tmp_path)
    channel.publish_batch(refs_of("abcd"))
    assert len(channel.poll()) == 4
    channel.mark_consumed(["a"])
    assert ids_of(open_channel(tmp_path, skip_ids=["c"]).poll()) == ["b", "d"]


def test_a_closed_channel_ends_after_what_is_in_it(tmp_path: Path):
    channel = open_channel(tmp_path)
    channel.publish_batch(refs_of("a"))
    channel.close()
    assert ids_of(channel.poll()) == ["a"]
    assert channel.poll() == []


def test_a_side_that_fails_ends_the_other_with_its_reason(tmp_path: Path):
    open_channel(tmp_path).fail("the engine died")
    with pytest.raises(StoreError, match="the engine died"):
        open_channel(tmp_path).poll()


def test_a_poll_waits_no_longer_than_the_idle_timeout(tmp_path: Path):
    with pytest.raises(StoreError, match="no reference came for"):
        open_channel(tmp_path, idle_timeout_s=0.05).poll()


def test_a_queue_hands_out_each_once_and_given_back_ones_again_first():
    queue = SampleRefQueue(skip_ids=["c"])
    assert queue.put(refs_of("abcd")) == 4
    assert ids_of(queue.get(2)) == ["a", "b"]
    queue.fail(["b"], requeue=True)
    with pytest.raises(ValueError, match="are not handed out"):
        queue.ack(["b"])
    assert ids_of(queue.get(9)) == ["b"]
    queue.ack(["a", "b"])
    queue.close()
    assert (ids_of(queue.get(9)), queue.get(9)) == (["d"], [])


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_consume_once_store_frees_with_the_last_lease_and_a_stale_release_does_nothing(tmp_path: Path, kind: str):
    keyed = open_keyed_store(kind, tmp_path)
    store = ConsumeOnceStore(keyed)
    ref = store.put(toy_ref(1), toy_tensors(toy_ref(1)))
    first, second = store.get(ref)[1], store.get(ref)[1]
    for _ in range(2):
        store.release(first)
        assert keyed.find_missing(ref.feature_keys.values()) == []
    store.release(second)
    assert keyed.find_missing(ref.feature_keys.values()) == list(ref.feature_keys.values())
    again = store.put(toy_ref(1), toy_tensors(toy_ref(1)))
    store.release(second)
    store.get(again)
    retaining = ConsumeOnceStore(keyed, retain_on_release=True)
    retaining.release(retaining.get(again)[1])
    store.get(again)
