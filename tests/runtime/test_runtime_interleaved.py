"""Whoever ends, fails or is told to stop first: the other one ends too, the first cause is raised, and nothing hangs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from answer_toys import conversation
from builder_toys import ARRIVAL, ROWS, make_producer_parts, make_trainer_parts
from capture_toys import WatchedEngine
from resumable_runs import assert_bit_equal
from stream_toys import SerialEngine, StreamFiles
from waiting import HANG_S

from draftworks.config.registry_files import ResponseSpec
from draftworks.data.chat import ChatTokenizer
from draftworks.dataflow.order_log import read_order
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import StreamingRefQueue
from draftworks.dataflow.watermark import Watermark
from draftworks.errors import EngineError, StoreError, TrainingError
from draftworks.features.memory_store import MemoryFeatureStore
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.runtime.arrival_producer import drive_producer
from draftworks.runtime.builders import (
    ProducerParts,
    build_disagg_online_consumer,
    build_disagg_online_producer,
    build_disagg_online_runtime,
    build_online_runtime,
)
from draftworks.runtime.interleaved import run_disagg_online_interleaved
from draftworks.runtime.row_sources import ConversationSource
from draftworks.runtime.trainer_runtime import TrainerParts, TrainerRuntime
from draftworks.training.backend import ensure_process_group

WATERMARK = Watermark(samples=6)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    with ensure_process_group(torch.device("cpu")):
        yield


@pytest.fixture(params=["queue", "channel"])
def build(request: pytest.FixtureRequest, tmp_path: Path):
    """Builds a runtime whose references go through a queue or a channel."""

    def build(parts: TrainerParts, produced: ProducerParts, **options) -> TrainerRuntime:
        common = {"watermark": WATERMARK, "idle_timeout_s": HANG_S, "join_timeout_s": HANG_S, **options}
        if request.param == "queue":
            return build_online_runtime(parts, produced, store=MemoryFeatureStore(), **common)
        store = SharedDirFeatureStore(tmp_path / "store")
        place = {"metadata_db_path": tmp_path / "control.sqlite"}
        return build_disagg_online_runtime(parts, produced, store, tmp_path / "channel", **place, **common)

    return build


class BreakingEngine(WatchedEngine):
    """Breaks down at one of its captures."""

    def __init__(self, engine, at: int) -> None:
        super().__init__(engine)
        self._left = at

    def capture(self, sequences, taps):
        self._left -= 1
        if self._left < 0:
            raise EngineError("the engine has lost its GPU")
        return super().capture(sequences, taps)


def no_producer_runs() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("producer")]


def test_a_source_that_is_exhausted_ends_the_training_after_the_last_whole_batch(build, stream_files: StreamFiles):
    long = ARRIVAL.model_copy(update={"max_steps": 50})
    runtime = build(make_trainer_parts(stream_files, long), make_producer_parts(stream_files))
    history = runtime.run()
    assert history.steps == len(ROWS) // 4
    assert history.evals[-1].step == history.steps
    assert no_producer_runs()


def test_a_trainer_that_is_done_first_stops_the_producer(build, stream_files: StreamFiles, tiny_engine):
    engine = SerialEngine(tiny_engine)
    short = ARRIVAL.model_copy(update={"max_steps": 2})
    runtime = build(make_trainer_parts(stream_files, short), make_producer_parts(stream_files, engine=engine))
    assert runtime.run().steps == 2
    assert len(engine.rows) < len(ROWS)
    assert no_producer_runs()


@pytest.mark.parametrize("at", [0, 4])
def test_an_error_of_the_producer_is_raised_on_the_trainers_thread(
    build, stream_files: StreamFiles, tiny_engine, at: int
):
    parts = make_trainer_parts(stream_files)
    runtime = build(parts, make_producer_parts(stream_files, engine=lambda: BreakingEngine(tiny_engine, at)))
    with pytest.raises(EngineError, match="the engine has lost its GPU"):
        runtime.run()
    assert no_producer_runs()


def test_an_error_of_the_trainer_stops_the_producer(build, stream_files: StreamFiles, monkeypatch):
    parts = make_trainer_parts(stream_files)
    runtime = build(parts, make_producer_parts(stream_files))
    train = runtime.trainer.core.train_step

    def fail(batch, ctx):
        if ctx.global_step == 2:
            raise TrainingError("the loss of optimizer step 2 is nan")
        return train(batch, ctx)

    monkeypatch.setattr(runtime.trainer.core, "train_step", fail)
    with pytest.raises(TrainingError, match="step 2 is nan"):
        runtime.run()
    assert no_producer_runs()


def test_of_two_workers_one_that_fails_leaves_its_tasks_to_the_other(build, stream_files: StreamFiles, tiny_engine):
    sound = SerialEngine(tiny_engine)
    engines: Iterator = iter([BreakingEngine(sound, 1), sound])
    long = ARRIVAL.model_copy(update={"max_steps": 50})
    produced = make_producer_parts(stream_files, engine=lambda: next(engines), workers=2)
    assert build(make_trainer_parts(stream_files, long), produced).run().steps == len(ROWS) // 4


def test_a_signal_stops_both_and_the_training_goes_on_later(build, stream_files: StreamFiles):
    folder = stream_files.folder
    straight = build_online_runtime(
        make_trainer_parts(stream_files, checkpoints=folder / "straight"), make_producer_parts(stream_files)
    )
    straight.run()
    asked = make_trainer_parts(stream_files, checkpoints=folder / "asked")
    step = [0]
    parts = make_trainer_parts(
        stream_files,
        checkpoints=folder / "asked",
        stop_signal=lambda: signal.SIGTERM if step[0] == 3 else 0,
        observers=[Stepping(step)],
    )
    stopped = build(parts, make_producer_parts(stream_files), watermark=Watermark(samples=16))  # steps are read ahead
    stopped.run()
    assert (stopped.trainer.controller.stopped_by, stopped.trainer.controller.global_step) == (signal.SIGTERM, 3)
    again = build(asked, make_producer_parts(stream_files), resume=True)
    again.run()
    assert_bit_equal(again.trainer.weights(), straight.trainer.weights())


class Stepping:
    """Notes the last recorded step."""

    def __init__(self, step: list[int]) -> None:
        self._step = step

    def on_train(self, point, total_steps: int) -> None:
        self._step[0] = point.step

    def on_eval(self, point) -> None: ...


@contextmanager
def driving(producer) -> Iterator[list[BaseException]]:
    """Context with a producer in a thread; yields what it raised."""
    failures: list[BaseException] = []

    def drive() -> None:
        try:
            drive_producer(producer)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=drive, name="producer")
    thread.start()
    yield failures
    thread.join()
    assert not thread.is_alive()


def test_a_producer_that_comes_again_loses_no_sample_and_gives_none_twice(stream_files: StreamFiles, tiny_engine):
    """It dies once while capturing, and once after it has committed and before it has published."""
    folder = stream_files.folder
    store, place = SharedDirFeatureStore(folder / "live"), {"metadata_db_path": folder / "live.sqlite"}
    channel = StreamingRefChannel(folder / "channel", idle_timeout_s=HANG_S)

    def produce(engine) -> None:
        producer = build_disagg_online_producer(
            make_producer_parts(stream_files, engine=engine), store, channel, watermark=Watermark(samples=99), **place
        )
        drive_producer(producer)

    with pytest.raises(EngineError):
        produce(lambda: BreakingEngine(tiny_engine, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftworks.dataflow.channel_writer.RefWriter.publish_batch", fail_to_publish)
        with pytest.raises(KeyboardInterrupt):
            produce(stream_files.engine)
    produce(stream_files.engine)
    with channel.open_consumer() as reader:
        queue = StreamingRefQueue(reader)
        found = [ref for _ in range(99) for ref in queue.get(9, 0.0)]
    assert sorted(ref.sample_id for ref in found) == sorted(row.sample_id for row in ROWS)
    for ref in found:
        store.release(store.get(ref)[1])
    assert queue.num_skipped == 0
    assert store.health()["samples"] == 0


def test_of_producers_with_a_channel_each_one_may_die_and_one_may_never_come(stream_files: StreamFiles, tiny_engine):
    folder = stream_files.folder
    store, place = SharedDirFeatureStore(folder / "live"), {"metadata_db_path": folder / "live.sqlite"}
    channels = [StreamingRefChannel(folder / name, idle_timeout_s=HANG_S) for name in ("dying", "living", "absent")]
    long = ARRIVAL.model_copy(update={"max_steps": 50, "eval_every": 0})
    consumer = build_disagg_online_consumer(make_trainer_parts(stream_files, long), store, channels, **place)
    sound = SerialEngine(tiny_engine)
    dying, living = (
        build_disagg_online_producer(
            make_producer_parts(stream_files, engine=lambda each=each: each), store, channel, name=name, **place
        )
        for name, each, channel in zip("ab", [BreakingEngine(sound, 2), sound], channels, strict=False)
    )
    with driving(dying) as failures:
        pass
    assert [type(each) for each in failures] == [EngineError]
    with driving(living):
        assert consumer.run().steps == len(ROWS) // 4
    assert store.health()["samples"] == len(ROWS) % 4


def fail_to_publish(writer, refs) -> int:
    if list(refs):
        raise KeyboardInterrupt
    return 0


def test_a_consumer_that_fails_ends_a_producer_of_another_process_with_its_reason(stream_files: StreamFiles):
    folder = stream_files.folder
    store, place = SharedDirFeatureStore(folder / "live"), {"deployment_mode": "local_colocated"}
    channel = StreamingRefChannel(folder / "channel", idle_timeout_s=HANG_S)
    consumer = build_disagg_online_consumer(make_trainer_parts(stream_files), store, channel, **place)
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files), store, channel, watermark=WATERMARK, **place
    )

    def fail(batch, ctx):
        raise TrainingError("no step is like another")

    consumer.trainer.core.train_step = fail
    with driving(producer) as failures, pytest.raises(TrainingError):
        consumer.run()
    assert [type(each) for each in failures] == [StoreError]
    assert "no step is like another" in str(failures[0])


def test_answers_are_generated_and_captured_in_one_visit(stream_files: StreamFiles, tiny_engine):
    chat = ChatTokenizer.load(stream_files.target, thinking=None)
    engine = SerialEngine(tiny_engine)
    source = ConversationSource(
        [conversation(number) for number in range(9)], chat, ResponseSpec(max_new_tokens=12, batch_size=3), 200
    )
    folder = stream_files.folder
    two_steps = ARRIVAL.model_copy(update={"max_steps": 9, "eval_every": 0})
    consumer = build_disagg_online_consumer(
        make_trainer_parts(stream_files, two_steps, checkpoints=folder / "checkpoints"),
        (store := SharedDirFeatureStore(folder / "live", retain_on_release=True)),
        (channel := StreamingRefChannel(folder / "channel")),
        metadata_db_path=folder / "live.sqlite",
    )
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files, source, engine), store, channel, metadata_db_path=folder / "live.sqlite"
    )
    history = run_disagg_online_interleaved(consumer, producer)
    assert history.steps == 2
    assert history.first_loss() is not None
    logged = [each for step in read_order(folder / "checkpoints" / "toy.order.jsonl") for each in step.samples]
    assert logged == [conversation(number).id for number in range(8)]
    captured = engine.rows
    for ref in producer.pool.iterate_committed():
        for each in ref:
            tensors, _ = store.get(each)
            assert tuple(tensors["input_ids"].tolist()) in captured
            assert 0 < int(tensors["loss_mask"].sum()) <= 12
            assert bool(tensors["loss_mask"][-1])
