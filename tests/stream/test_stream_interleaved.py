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
from draftworks.errors import EngineError, StoreError, TrainingError
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.memory_store import MemoryFeatureStore
from draftworks.stream.arrival_producer import ProducerParts, drive_producer
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.row_sources import ConversationSource
from draftworks.stream.topologies import (
    TrainerParts,
    TrainerRuntime,
    build_disagg_online_consumer,
    build_disagg_online_producer,
    build_disagg_online_runtime,
    build_online_runtime,
    run_disagg_online_interleaved,
)
from draftworks.training.backend import ensure_process_group

WATERMARK = Watermark(samples=6)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    with ensure_process_group(torch.device("cpu")):
        yield


@pytest.fixture(params=["memory", "shared"])
def build(request: pytest.FixtureRequest, tmp_path: Path):
    """Builds a runtime with features in memory, or in a folder."""

    def build(parts: TrainerParts, produced: ProducerParts, **options) -> TrainerRuntime:
        common = {"watermark": WATERMARK, "idle_timeout_s": HANG_S, "join_timeout_s": HANG_S, **options}
        if request.param == "memory":
            return build_online_runtime(parts, produced, store=MemoryFeatureStore(), **common)
        store, place = KeyedSharedDirStore(tmp_path / "store"), {"metadata_db_path": tmp_path / "control.sqlite"}
        return build_disagg_online_runtime(parts, produced, store, **place, **common)

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
    """It dies once while capturing, and once after it has stored and before it has committed."""
    folder = stream_files.folder
    store, place = KeyedSharedDirStore(folder / "live"), {"metadata_db_path": folder / "live.sqlite"}

    def make(engine):
        return build_disagg_online_producer(
            make_producer_parts(stream_files, engine=engine),
            store,
            global_batch_size=4,
            watermark=Watermark(samples=99),
            **place,
        )

    with pytest.raises(EngineError):
        drive_producer(make(lambda: BreakingEngine(tiny_engine, 3)))
    with pytest.MonkeyPatch.context() as patch:
        commit = "draftworks.stream.controller.DataFlowController.commit_samples"
        patch.setattr(commit, fail_to_commit)
        with pytest.raises(KeyboardInterrupt):
            drive_producer(make(stream_files.engine))
    producer = make(stream_files.engine)
    drive_producer(producer)
    found = list(producer.controller.iterate_refs())
    assert sorted(ref.sample_id for ref in found) == sorted(row.sample_id for row in ROWS)
    for ref in found:
        store.release(store.get(ref)[1])


def fail_to_commit(controller, refs, done=(), frees=None):
    raise KeyboardInterrupt


def test_of_several_producers_one_may_die(stream_files: StreamFiles, tiny_engine):
    folder = stream_files.folder
    store, place = KeyedSharedDirStore(folder / "live"), {"metadata_db_path": folder / "live.sqlite"}
    long = ARRIVAL.model_copy(update={"max_steps": 50, "eval_every": 0})
    consumer = build_disagg_online_consumer(make_trainer_parts(stream_files, long), store, **place)
    sound = SerialEngine(tiny_engine)
    dying, living = (
        build_disagg_online_producer(
            make_producer_parts(stream_files, engine=lambda each=each: each),
            store,
            global_batch_size=4,
            name=name,
            **place,
        )
        for name, each in zip("ab", [BreakingEngine(sound, 2), sound], strict=True)
    )
    with driving(dying) as failures:
        pass
    assert [type(each) for each in failures] == [EngineError]
    with driving(living):
        assert consumer.run().steps == len(ROWS) // 4
    assert store.health()["samples"] == 0


def test_a_consumer_that_fails_ends_a_producer_of_another_process_with_its_reason(stream_files: StreamFiles):
    folder = stream_files.folder
    store, place = KeyedSharedDirStore(folder / "live"), {"metadata_db_path": folder / "live.sqlite"}
    consumer = build_disagg_online_consumer(make_trainer_parts(stream_files), store, **place)
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files), store, global_batch_size=4, watermark=WATERMARK, **place
    )

    def fail(batch, ctx):
        raise TrainingError("no step is like another")

    consumer.trainer.core.train_step = fail
    with driving(producer) as failures, pytest.raises(TrainingError):
        consumer.run()
    assert [type(each) for each in failures] == [StoreError]
    assert "no step is like another" in str(failures[0])


def test_whoever_waits_in_vain_says_for_whom(stream_files: StreamFiles):
    folder = stream_files.folder
    store, place = KeyedSharedDirStore(folder / "live"), {"metadata_db_path": folder / "live.sqlite"}
    consumer = build_disagg_online_consumer(make_trainer_parts(stream_files), store, idle_timeout_s=0.5, **place)
    with pytest.raises(StoreError, match=r"no reference came for 0.5 s: no producer has come"):
        consumer.run()
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files), store, global_batch_size=4, watermark=WATERMARK, idle_timeout_s=0.5, **place
    )
    with pytest.raises(
        StoreError, match=r"nothing was consumed for 0.5 s, with no room below .*Consumer trainer hangs"
    ):
        drive_producer(producer)
    again = build_disagg_online_consumer(make_trainer_parts(stream_files), store, idle_timeout_s=0.5, **place)
    with pytest.raises(StoreError, match=r"no producer is at work, \d+ tasks are not taken, 0 are, \d are done"):
        again.run()


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
        (store := KeyedSharedDirStore(folder / "live")),
        free_at="never",
        metadata_db_path=folder / "live.sqlite",
    )
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files, source, engine),
        store,
        global_batch_size=4,
        metadata_db_path=folder / "live.sqlite",
    )
    history = run_disagg_online_interleaved(consumer, producer)
    assert history.steps == 2
    assert history.first_loss() is not None
    logged = [each for step in producer.controller.read_order() for each in step.sample_ids]
    assert logged == [conversation(number).id for number in range(8)]
    captured = engine.rows
    for ref in producer.controller.iterate_refs():
        tensors, _ = store.get(ref)
        assert tuple(tensors["input_ids"].tolist()) in captured
        assert 0 < int(tensors["loss_mask"].sum()) <= 12
        assert bool(tensors["loss_mask"][-1])
