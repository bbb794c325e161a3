"""Both queues: each reference once, in order, acknowledged; ends, failures and time limits on both sides."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from features_toys import toy_ref
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S, StepClock

from draftworks.dataflow.channel_writer import RefWriter
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import RefQueue, SampleRefQueue, StreamingRefQueue
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import SampleRef

CONSUMER = """
import sys
from pathlib import Path
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import StreamingRefQueue

queue = StreamingRefQueue(StreamingRefChannel(Path(sys.argv[1])).open_consumer())
while refs := queue.get(2):
    queue.ack(ref.sample_id for ref in refs)
    print(*(ref.sample_id for ref in refs), flush=True)
    sys.stdin.readline()
"""


def refs_of(*numbers: int) -> list[SampleRef]:
    return [replace(toy_ref(number), estimated_bytes=100) for number in numbers]


def ids(refs: list[SampleRef]) -> list[str]:
    return [ref.sample_id for ref in refs]


class Both:
    """A queue and its producer's side, of either kind."""

    def __init__(
        self, kind: str, folder: Path, idle_timeout_s: float = HANG_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.writer: RefWriter | None = None
        self.queue: RefQueue
        if kind == "memory":
            self.queue = memory = SampleRefQueue(idle_timeout_s=idle_timeout_s, clock=clock)
            self.put: Callable[[list[SampleRef]], int] = memory.put
            self.close, self.read_in_flight = memory.close, lambda: memory.in_flight
            self.abort = lambda reason: memory.abort(StoreError(reason))
        else:
            channel = StreamingRefChannel(folder, idle_timeout_s=idle_timeout_s, clock=clock)
            self.writer = writer = channel.open_writer()
            self.queue = StreamingRefQueue(channel.open_consumer())
            self.put, self.close, self.abort = writer.publish_batch, writer.close, writer.fail
            self.read_in_flight = lambda: writer.in_flight_remote

    def end(self) -> None:
        if self.writer is not None:
            self.writer.release()
        if isinstance(self.queue, StreamingRefQueue):
            self.queue.close()


@pytest.fixture(params=["memory", "channel"])
def make(request, tmp_path: Path) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def make(**options: Any) -> Both:
        made.append(Both(request.param, tmp_path, **options))
        return made[-1]

    yield make
    for both in made:
        both.end()


def test_references_come_once_in_order_until_drained(make):
    both = make()
    queue = both.queue
    assert queue.get(2, wait_s=0) == []
    both.put(refs_of(4, 2, 9))
    assert queue.get(2) == refs_of(4, 2)
    assert not queue.is_drained
    both.close()
    assert queue.get(5) == refs_of(9)
    assert queue.get(5) == []
    assert queue.is_drained


def test_acknowledged_and_failed_references_give_their_room_back(make):
    both = make()
    both.put(refs_of(0, 1, 2, 3))
    both.queue.get(3)
    assert both.read_in_flight() == InFlight(4, 400)
    both.queue.ack(["s1", "s0"])
    assert both.read_in_flight() == InFlight(2, 200)
    both.queue.fail(["s2"])
    assert both.read_in_flight() == InFlight(1, 100)
    for sample_ids in (["s0"], ["s3"], ["s9"]):
        with pytest.raises(ValueError, match="not handed out"):
            both.queue.ack(sample_ids)
    assert both.read_in_flight() == InFlight(1, 100)


def test_requeued_references_come_next(make):
    both = make()
    both.put(refs_of(0, 1, 2, 3))
    both.close()
    assert ids(both.queue.get(3)) == ["s0", "s1", "s2"]
    both.queue.fail(["s0", "s2"], requeue=True)
    assert ids(both.queue.get(9)) == ["s0", "s2", "s3"]
    both.queue.ack(["s0", "s1", "s2", "s3"])
    assert both.queue.is_drained
    assert both.read_in_flight() == InFlight(0, 0)


def test_half_an_acknowledgement_changes_nothing(make):
    both = make()
    both.put(refs_of(0, 1))
    both.queue.get(2)
    for sample_ids in (["s0", "s7"], ["s0", "s0"]):
        with pytest.raises(ValueError, match="handed out"):
            both.queue.ack(sample_ids)
    both.queue.ack(["s0", "s1"])


def test_second_references_of_a_sample_take_no_place(make):
    both = make()
    both.put(refs_of(0, 1, 0, 1, 1, 2))
    both.close()
    assert ids(both.queue.get(9)) == ["s0", "s1", "s2"]
    both.queue.ack(["s0", "s1", "s2"])
    assert both.read_in_flight() == InFlight(0, 0)


def test_a_failure_reaches_who_waits(make):
    both = make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(both.queue.get, 1)
        time.sleep(0.05)
        both.abort("the engine died")
        with pytest.raises(StoreError, match="the engine died"):
            waiting.result()
    with pytest.raises(StoreError, match="the engine died"):
        both.queue.get(1, wait_s=0)


def test_waiting_ends_with_the_idle_timeout(make):
    with pytest.raises(StoreError, match=r"for 0.2 s"):
        make(idle_timeout_s=0.2).queue.get(1)


def test_a_wait_in_several_calls_ends_with_the_idle_timeout_too(make):
    queue = make(idle_timeout_s=0.3, clock=StepClock()).queue
    found = [queue.get(1, wait_s=0.2)]
    with pytest.raises(StoreError, match=r"for 0.3 s"):
        found += [queue.get(1, wait_s=0.2)]
    assert found == [[]]


def test_one_thread_acknowledges_while_another_waits(make):
    both = make()
    both.put(refs_of(0))
    both.queue.get(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(both.queue.get, 1)
        time.sleep(0.05)
        both.queue.ack(["s0"])
        both.put(refs_of(1))
        assert waiting.result() == refs_of(1)


@settings(max_examples=20)
@given(
    limit=st.integers(1, 5),
    bytes_limit=st.one_of(st.none(), st.integers(100, 350)),
    takes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    total=st.integers(0, 25),
)
def test_a_memory_queue_never_exceeds_its_watermark_and_loses_nothing(limit, bytes_limit, takes, total):
    watermark = Watermark(limit, bytes_limit)
    queue, seen, turn = SampleRefQueue(watermark, idle_timeout_s=HANG_S), [], 0

    def produce() -> None:
        queue.put(refs_of(*range(total)))
        queue.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    while not queue.is_drained:
        refs = queue.get(takes[turn % len(takes)])
        assert watermark.has_room(queue.in_flight, InFlight())
        queue.ack(ids(refs))
        seen += refs
        turn += 1
    thread.join()
    assert seen == refs_of(*range(total))
    assert queue.in_flight == InFlight()


def test_a_full_memory_queue_stops_refuses_and_waits(tmp_path):
    queue = SampleRefQueue(Watermark(samples=2, bytes=300), idle_timeout_s=0.2)
    assert queue.put(refs_of(0, 1, 2), should_stop=lambda: True) == 2
    with pytest.raises(StoreError, match="did not move for 0.2 s: 2 wait in it, 2 samples, 200 bytes are in flight"):
        queue.put(refs_of(3))
    with pytest.raises(StoreError, match="more than the watermark ever lets through"):
        queue.put([replace(toy_ref(4), estimated_bytes=301)])
    queue.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.put, refs_of(5))
        queue.ack(ids(queue.get(2)))
        with pytest.raises(StoreError, match="closed"):
            waiting.result()


def test_a_consumers_failure_ends_the_wait_of_the_producer():
    queue = SampleRefQueue(Watermark(samples=1), idle_timeout_s=HANG_S)
    queue.put(refs_of(0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.put, refs_of(1))
        queue.abort(KeyError("hf9"))
        with pytest.raises(StoreError, match="failed: KeyError: 'hf9'") as found:
            waiting.result()
    assert isinstance(found.value.__cause__, KeyError)
    queue.abort(ConfigError("a second one"))
    with pytest.raises(StoreError, match="hf9"):
        queue.get(1)


@settings(max_examples=20)
@given(total=st.integers(0, 12), lives=st.lists(st.integers(0, 4), max_size=3), count=st.integers(1, 3))
def test_a_restarted_consumer_gets_what_is_not_durable_and_counts_all(total, lives, count):
    """Every sample is acknowledged durably in exactly one life of the consumer; the writer's count always ends at 0."""
    with tempfile.TemporaryDirectory() as folder:
        channel = StreamingRefChannel(Path(folder), idle_timeout_s=HANG_S)
        durable: list[str] = []
        with channel.open_writer() as writer:
            writer.publish_batch(refs_of(*range(total)))
        for turns in [*lives, total + 1]:
            reader = channel.open_consumer()
            queue, before = StreamingRefQueue(reader, skip_ids=durable), len(durable)
            for _ in range(turns):
                taken = ids(queue.get(count))
                queue.ack(taken)
                durable += taken
            assert not queue.is_drained or queue.num_skipped == before
            reader.release()
        assert durable == [f"s{number}" for number in range(total)]
        assert queue.is_drained
        assert channel.open_writer().in_flight_remote == InFlight()


def test_a_consumer_killed_by_sigkill_gives_its_side_up(tmp_path):
    """The next one leaves out what was durable, and the writer's count comes out even."""
    channel = StreamingRefChannel(tmp_path, idle_timeout_s=HANG_S)
    with channel.open_writer() as writer:
        writer.publish_batch(refs_of(*range(7)))
        command = [sys.executable, "-c", CONSUMER, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as consumer:
            assert consumer.stdin is not None
            assert consumer.stdout is not None
            durable = consumer.stdout.readline().split()
            consumer.stdin.write("\n")
            consumer.stdin.flush()
            durable += consumer.stdout.readline().split()
            consumer.kill()
        assert durable == ["s0", "s1", "s2", "s3"]
        assert writer.in_flight_remote == InFlight(3, 300)
        queue = StreamingRefQueue(channel.open_consumer(), skip_ids=durable)
        assert ids(queue.get(9)) == ["s4", "s5", "s6"]
        assert writer.in_flight_remote == InFlight(3, 300)
        queue.ack(["s4", "s5", "s6"])
        assert writer.in_flight_remote == InFlight()
        queue.close()


def test_a_consumer_that_ends_or_fails_is_heard_by_the_writer(tmp_path):
    channel = StreamingRefChannel(tmp_path, idle_timeout_s=HANG_S)
    with channel.open_writer() as writer:
        StreamingRefQueue(channel.open_consumer()).close()
        assert writer.is_consumer_done
        StreamingRefQueue(channel.open_consumer()).abort(KeyError("hf9"))
        with pytest.raises(StoreError, match="KeyError: 'hf9'"):
            writer.wait_for_room(Watermark(), InFlight(1))
