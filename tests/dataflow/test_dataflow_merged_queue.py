"""Several queues as one: every sample once, and a queue that fails or says nothing holds nobody up."""

from __future__ import annotations

import pytest
from dataflow_toys import ids_of, toy_slim_ref
from hypothesis import given
from hypothesis import strategies as st

from draftworks.dataflow.merged_queue import MergedRefQueue
from draftworks.dataflow.ref_queues import SampleRefQueue
from draftworks.errors import StoreError


def queue_of(*names: str, ended: bool = False) -> SampleRefQueue:
    queue = SampleRefQueue()
    queue.put(map(toy_slim_ref, names))
    if ended:
        queue.close()
    return queue


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), min_size=1, max_size=3),
    st.sets(st.sampled_from("abcdefgh")),
    st.integers(1, 4),
)
def test_every_sample_comes_once_and_what_is_left_out_is_consumed(published, skipped, count):
    """The last queue ends, so it has all that the others have."""
    everything = sorted({name for names in published for name in names})
    queues = [*(queue_of(*names) for names in published), queue_of(*everything, ended=True)]
    merged, found = MergedRefQueue(queues, skipped), []
    while not merged.is_drained:
        refs = merged.get(count, 0.0)
        assert len(refs) <= count
        merged.ack(ids_of(refs))
        found += ids_of(refs)
    assert sorted(found) == sorted(set(everything) - skipped)
    assert queues[-1].in_flight.samples == 0


def test_a_queue_that_fails_is_passed_over_until_no_other_is_left():
    first, second = queue_of("a"), queue_of("b")
    merged = MergedRefQueue([first, second])
    first.abort(StoreError("the disk of the first producer is gone"))
    assert ids_of(merged.get(5)) == ["b"]
    assert merged.get(5, 0.0) == []
    second.abort(StoreError("and of the second"))
    with pytest.raises(StoreError, match="the first producer is gone"):
        merged.get(5, 0.0)


def test_samples_go_back_to_the_queue_that_gave_them():
    first, second = queue_of("a"), queue_of("b")
    merged = MergedRefQueue([first, second])
    assert [ids_of(merged.get(1)) for _ in range(2)] == [["a"], ["b"]]
    with pytest.raises(ValueError, match="not handed out"):
        merged.ack(["a", "c"])
    merged.fail(["b"], requeue=True)
    assert ids_of(merged.get(1)) == ["b"]
    merged.ack(["a", "b"])
    assert (first.in_flight.samples, second.in_flight.samples) == (0, 0)


def test_silence_of_all_queues_is_one_error():
    merged = MergedRefQueue([queue_of(), queue_of()], idle_timeout_s=0.2)
    with pytest.raises(StoreError, match="no reference came through any of 2 channels"):
        merged.get(1)
