"""Arrival order: whole batches, the same on every rank and with any number of ranks, ends agreed, repeatable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from features_toys import toy_ref
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, wait_until

from draftworks.dataflow.distributor import RefDistributor
from draftworks.dataflow.order_log import OrderLog, read_order, read_trained_ids, replay_order
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import SampleRefQueue, StreamingRefQueue
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.errors import ConfigError, StoreError

SIZE = 4

PRODUCER = """
import sys, time
from pathlib import Path
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.features.contracts import SampleRef

folder, total, repeats, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
with StreamingRefChannel(folder, idle_timeout_s=600).open_writer() as writer:
    for number in range(total):
        ref = SampleRef(f"s{number}", "run", f"s{number}", "", {"last": f"{number:032x}"}, {}, num_tokens=3 + number % 5)
        assert writer.wait_for_room(Watermark(samples=12), InFlight(repeats))
        writer.publish_batch([ref] * repeats)
        time.sleep(pause)
"""


def start_producer(folder: Path, total: int, repeats: int = 1, pause: float = 0.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PRODUCER, str(folder), str(total), str(repeats), str(pause)])


def queue_of(numbers, close: bool = True) -> SampleRefQueue:
    queue = SampleRefQueue(Watermark(samples=999), idle_timeout_s=HANG_S)
    queue.put(map(toy_ref, numbers))
    if close:
        queue.close()
    return queue


def batches_of(distributor: RefDistributor) -> list[list[str]]:
    """Train to the end: every step is acknowledged when it is made."""
    found = []
    while (refs := distributor.next_step()) is not None:
        found.append([ref.sample_id for ref in refs])
        distributor.ack_step()
    return found


def expected(total: int) -> list[list[str]]:
    return [[f"s{at + index}" for index in range(SIZE)] for at in range(0, total - SIZE + 1, SIZE)]


@given(numbers=st.lists(st.integers(0, 20), max_size=40), pieces=st.integers(1, 5))
def test_batches_are_whole_whatever_comes_twice_and_however_it_comes(numbers, pieces):
    queue = SampleRefQueue(Watermark(samples=SIZE), idle_timeout_s=HANG_S)
    distributor = RefDistributor(queue, SIZE)

    def produce() -> None:
        for at in range(0, len(numbers), pieces):
            queue.put(map(toy_ref, numbers[at : at + pieces]))
        queue.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    found = batches_of(distributor)
    thread.join()
    once = [f"s{number}" for number in dict.fromkeys(numbers)]
    whole = len(once) - len(once) % SIZE
    assert found == [once[at : at + SIZE] for at in range(0, whole, SIZE)]
    assert [ref.sample_id for ref in distributor.dropped] == once[whole:]
    assert distributor.is_over
    assert distributor.step == len(found)
    assert queue.in_flight == InFlight()


def test_a_watermark_below_one_batch_is_refused():
    with pytest.raises(ConfigError, match=r"watermark.samples: expected at least one global batch, 4, found 3"):
        RefDistributor(SampleRefQueue(Watermark(samples=SIZE - 1)), SIZE)


def test_it_does_not_wait_unless_asked():
    queue = queue_of(range(5), close=False)
    distributor = RefDistributor(queue, SIZE)
    assert distributor.next_step(wait=False) is not None
    assert distributor.next_step(wait=False) is None  # a wait would end with the idle timeout, an error
    assert not distributor.is_over
    queue.put(map(toy_ref, range(5, 8)))
    assert [ref.sample_id for ref in distributor.next_step(wait=False) or ()] == ["s4", "s5", "s6", "s7"]


def test_a_step_is_on_the_disk_before_it_is_dealt_and_a_failing_log_ends_the_stream(tmp_path: Path):
    log = OrderLog(tmp_path / "log", SIZE)
    distributor = RefDistributor(queue_of(range(9)), SIZE, log)
    assert distributor.next_step() is not None
    assert [list(logged.samples) for logged in read_order(tmp_path / "log")] == expected(4)
    log.close()
    with pytest.raises(StoreError, match="The order of training is written there before each step"):
        distributor.next_step()
    assert distributor.step == 1


def test_a_stop_signal_ends_the_wait_and_drops_nothing():
    queue, signals = queue_of(range(2), close=False), [0, 0, 15]
    distributor = RefDistributor(queue, SIZE, stop_signal=lambda: signals.pop(0))
    assert distributor.next_step(wait=False) is None
    assert distributor.next_step() is None
    assert (distributor.is_over, distributor.stopped_by, distributor.dropped) == (True, 15, ())
    assert queue.in_flight.samples == 2
    assert distributor.next_step() is None


def test_a_resumed_training_goes_on_as_the_undisturbed_one(tmp_path: Path):
    """Killed after any step and resumed from any earlier checkpoint, the log is that of the undisturbed run."""
    channel = StreamingRefChannel(tmp_path / "channel", idle_timeout_s=HANG_S)
    with channel.open_writer() as writer:
        writer.publish_batch(map(toy_ref, range(22)))
    path = tmp_path / "log"
    for start, trained in ((0, 3), (2, 4), (4, 9)):
        log, reader = OrderLog(path, SIZE, keep_steps=start), channel.open_consumer()
        queue = StreamingRefQueue(reader, skip_ids=read_trained_ids(path, start))
        distributor = RefDistributor(queue, SIZE, log, start_step=start)
        while distributor.step < trained and distributor.next_step() is not None:
            distributor.ack_step()
        log.close()
        reader.release()
    assert [list(logged.samples) for logged in read_order(path)] == expected(22)
    assert [ref.sample_id for ref in distributor.dropped] == ["s20", "s21"]
    assert channel.open_writer().in_flight_remote == InFlight()


def on_two_ranks(folder: Path, work: Callable[..., None], *args: object) -> list[dict]:
    on_ranks(2, folder, _report, work, folder, *args)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def _report(rank: int, work: Callable[..., dict], folder: Path, *args: object) -> None:
    (folder / f"rank{rank}.json").write_text(json.dumps(work(rank, folder, *args)))


def _train_from_channel(rank: int, folder: Path) -> dict:
    queue = log = None
    if rank == 0:
        reader = StreamingRefChannel(folder / "channel", idle_timeout_s=600).open_consumer()
        queue, log = StreamingRefQueue(reader), OrderLog(folder / "log", SIZE)
    distributor = RefDistributor(queue, SIZE, log)
    return {"batches": batches_of(distributor), "dropped": len(distributor.dropped), "stopped": distributor.stopped_by}


def test_two_ranks_get_the_batches_of_one_from_a_live_producer_that_repeats_itself(tmp_path: Path):
    producer = start_producer(tmp_path / "channel", 23, repeats=3)
    try:
        first, second = on_two_ranks(tmp_path, _train_from_channel)
        assert producer.wait() == 0
    finally:
        producer.kill()
    assert first["batches"] == second["batches"] == expected(23)
    assert (first["dropped"], second["dropped"]) == (3, 0)
    queue = replay_order(tmp_path / "log", map(toy_ref, range(23)), SIZE)
    assert batches_of(RefDistributor(queue, SIZE)) == first["batches"]


def _train_until_told(rank: int, folder: Path) -> dict:
    """Rank 1 is told to stop while rank 0 waits for references."""
    distributor = RefDistributor(
        queue_of(range(6), close=False) if rank == 0 else None,
        SIZE,
        stop_signal=lambda: 15 if rank == 1 and distributor.step == 1 else 0,
    )
    return {"batches": batches_of(distributor), "dropped": len(distributor.dropped), "stopped": distributor.stopped_by}


def _fail(rank: int, folder: Path) -> dict:
    queue = None
    if rank == 0:
        queue = queue_of(range(6), close=False)
        queue.abort(StoreError("the engine died"))
    distributor = RefDistributor(queue, SIZE)
    try:
        return {"error": str(batches_of(distributor))}
    except StoreError as error:
        return {"error": str(error)}


def _lose_the_log(rank: int, folder: Path) -> dict:
    log = OrderLog(folder / "lost", SIZE) if rank == 0 else None
    distributor = RefDistributor(queue_of(range(8)) if rank == 0 else None, SIZE, log)
    distributor.next_step()
    if log is not None:
        log.close()
    try:
        return {"error": str(distributor.next_step())}
    except StoreError as error:
        return {"error": str(error)}


def _all_ends(rank: int, folder: Path) -> dict:
    return {work.__name__: work(rank, folder) for work in (_train_until_told, _fail, _lose_the_log)}


def test_stop_and_failures_are_agreed_by_all_ranks(tmp_path: Path):
    first, second = on_two_ranks(tmp_path, _all_ends)
    assert first["_train_until_told"] == second["_train_until_told"]
    assert first["_train_until_told"] == {"batches": expected(4), "dropped": 0, "stopped": 15}
    assert first["_fail"]["error"] == "the engine died"
    assert second["_fail"]["error"] == "rank 0: the engine died"
    for report, prefix in ((first, ""), (second, "rank 0: ")):
        assert report["_lose_the_log"]["error"].startswith(f"{prefix}{tmp_path / 'lost'}: expected a file")


def test_a_producer_killed_and_started_again_feeds_one_training(tmp_path: Path):
    """Killed by SIGKILL while references travel; the next producer begins at the first sample again."""
    folder = tmp_path / "channel"
    producers = [start_producer(folder, 20, pause=0.02)]

    def kill_and_start_again() -> None:
        channel_file = folder / "refs.jsonl"
        wait_until(lambda: channel_file.exists() and channel_file.stat().st_size >= 600, "references in the channel")
        os.kill(producers[0].pid, signal.SIGKILL)
        producers[0].wait()
        producers.append(start_producer(folder, 20))

    killer = threading.Thread(target=kill_and_start_again, daemon=True)
    killer.start()
    try:
        report = _train_from_channel(0, tmp_path)
        killer.join()
        assert producers[1].wait() == 0
    finally:
        for producer in producers:
            producer.kill()
    assert report["batches"] == expected(20)
    assert producers[0].returncode == -signal.SIGKILL
