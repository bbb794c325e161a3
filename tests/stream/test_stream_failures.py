"""Whatever dies or is lost, a streamed training ends with the stored draft, or with the first cause; it never hangs."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from itertools import product

import pytest
import torch
from capture_toys import WatchedEngine
from coverings import gate_or_long
from stream_toys import STREAMS, StreamFiles, make_rows
from waiting import HANG_S

from draftworks.config.features import StreamingSpec
from draftworks.distributed.stop_signals import Interrupted
from draftworks.errors import CaptureError, ConfigError, DraftworksError, StoreError
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train
from draftworks.stream.stream_consumer import StreamConsumer
from draftworks.stream.stream_rounds import make_streaming_plan
from draftworks.stream.training_stream import AwaitedStore, open_controller


def train_streamed(files: StreamFiles) -> str:
    return train(files.train_run("streamed"), ProgramContext())["weights_digest"]


def with_settings(files: StreamFiles, **settings) -> StreamFiles:
    return replace(files, settings=StreamingSpec(**{"watermark": {"samples": 8}, "timeout_s": 60, **settings}))


@pytest.mark.parametrize(
    ("step", "free_at"),
    gate_or_long(product([1, 3, 5], ["step", "checkpoint"]), [(1, "step"), (3, "checkpoint"), (5, "step")]),
)
def test_a_trainer_that_dies_resumes_and_ends_with_the_stored_draft(
    stream_files: StreamFiles, train_stored, monkeypatch: pytest.MonkeyPatch, free_at: str, step: int
):
    files = with_settings(stream_files, free_at=free_at)
    acknowledge = StreamConsumer.on_step

    def die(self: StreamConsumer, global_step: int) -> None:
        acknowledge(self, global_step)
        if global_step == step:
            raise KeyboardInterrupt

    with files.producing():
        with monkeypatch.context() as patch:
            patch.setattr(StreamConsumer, "on_step", die)
            with pytest.raises(KeyboardInterrupt):
                train_streamed(files)
        assert train_streamed(files) == train_stored()["weights_digest"]
    assert open_store(files.place.store).health()["samples"] == 0


def test_a_killed_trainer_whose_acknowledgements_are_beyond_its_checkpoint_says_so(stream_files: StreamFiles):
    consumer, again = open_consumer(stream_files), open_consumer(stream_files)
    plan, store = consumer.plan, open_store(stream_files.place.store)
    with stream_files.producing(), consumer.hold():
        reader = AwaitedStore(store, timeout_s=HANG_S)
        for step in (1, 2, 3):
            for ref in plan.get_refs(plan.get_sample_ids(step)):
                reader.get(ref)
            consumer.on_step(step)
    with again.hold():
        restart = again.reconcile(2)
        assert (restart.global_step, restart.released, restart.optimizer_durable) == (2, 8, False)
        assert again.reconcile(2).optimizer_durable


def test_features_that_are_lost_while_the_training_runs_are_captured_again(
    stream_files: StreamFiles, train_stored, monkeypatch: pytest.MonkeyPatch
):
    lost = threading.Event()
    acknowledge = StreamConsumer.on_step

    def lose(self: StreamConsumer, global_step: int) -> None:
        acknowledge(self, global_step)
        if global_step == 2:
            for path in (stream_files.folder / "stream" / "samples").rglob("*.safetensors"):
                path.unlink(missing_ok=True)
            lost.set()

    monkeypatch.setattr(StreamConsumer, "on_step", lose)
    with stream_files.producing():
        digest = train_streamed(stream_files)
    assert lost.is_set()
    assert digest == train_stored()["weights_digest"]


def test_what_a_dead_producer_had_leased_goes_to_another(stream_files: StreamFiles, train_stored):
    files = with_settings(stream_files, lease_s=1.0)
    run = files.produce_run("dead")
    plan = make_streaming_plan(read_feature_set(run.features).refs, run.streams, run.steps, run.stream)
    controller = open_controller(run.stream)
    controller.add_tasks(plan.make_tasks(plan.groups[0], run.stream.run_id, run.capture.batch_tokens))
    assert controller.lease_tasks("dead", limit=2)
    with files.producing("living"):
        assert train_streamed(files) == train_stored()["weights_digest"]


def test_a_sample_that_cannot_be_captured_ends_the_training_with_its_reason(stream_files: StreamFiles, tiny_engine):
    engine = WatchedEngine(tiny_engine)
    engine.damage = lambda streams: {name: tensor * float("nan") for name, tensor in streams.items()}
    files = replace(stream_files, engine=lambda: engine)
    failed: list[BaseException] = []
    workers = [files.make_worker(files.produce_run(name)) for name in ("a", "b", "c")]

    def work() -> None:
        for worker in workers:
            try:
                worker.run()
            except DraftworksError as error:
                failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(CaptureError, match=r"2 of 13 samples have no valid features.*values are not finite"):
        train_streamed(files)
    thread.join()
    assert len(failed) == 3


def test_of_a_batch_only_the_sample_that_fails_is_lost(stream_files: StreamFiles, tiny_engine):
    bad = make_rows("train", 13, seed=1)[3]
    engine = WatchedEngine(tiny_engine)

    def damage(streams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wrong = len(streams["last"]) == len(bad.input_ids) and torch.equal(streams["last"], expected["last"])
        return {name: tensor * float("nan") for name, tensor in streams.items()} if wrong else streams

    expected = tiny_engine.capture([bad.input_ids.tolist()], [])[0]
    engine.damage = damage
    alone = {"batch_tokens": len(bad.input_ids), "max_failed_share": 0.2}
    files = replace(stream_files, engine=lambda: engine, capture_options=alone)
    with files.producing():
        report = train(files.train_run("streamed"), ProgramContext())
    assert set(report["left_out_samples"]) == {"train3"}
    (letter,) = open_controller(files.place).read_dead_letters()
    assert letter.lost_samples == ("train3",)


def test_without_a_producer_the_training_ends_in_the_given_time(stream_files: StreamFiles):
    with pytest.raises(StoreError, match="its features have not come within 1 s"):
        train_streamed(with_settings(stream_files, timeout_s=1.0))


def open_consumer(files: StreamFiles) -> StreamConsumer:
    run = files.produce_run()
    plan = make_streaming_plan(read_feature_set(run.features).refs, STREAMS, run.steps, run.stream)
    return StreamConsumer(plan, open_controller(run.stream), open_store(run.stream.store))


def test_a_second_trainer_of_one_stream_is_refused(stream_files: StreamFiles):
    files = with_settings(stream_files, lease_s=4.0)
    with open_consumer(files).hold(), pytest.raises(StoreError, match="consumer trainer is held by"):
        train_streamed(files)


def test_the_hold_of_a_killed_trainer_is_waited_for(stream_files: StreamFiles, train_stored):
    files = with_settings(stream_files, lease_s=1.0)
    open_controller(files.place).hold_consumer()
    with files.producing():
        assert train_streamed(files) == train_stored()["weights_digest"]


def test_a_watermark_below_one_step_is_refused_before_anything_is_captured(stream_files: StreamFiles):
    with pytest.raises(ConfigError, match=r"watermark\.samples"):
        train_streamed(with_settings(stream_files, watermark={"samples": 3}))


def test_a_stopped_training_goes_on_later(stream_files: StreamFiles, train_stored, monkeypatch: pytest.MonkeyPatch):
    acknowledge = StreamConsumer.on_step

    def stop(self: StreamConsumer, global_step: int) -> None:
        acknowledge(self, global_step)
        if global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with stream_files.producing():
        with monkeypatch.context() as patch:
            patch.setattr(StreamConsumer, "on_step", stop)
            with pytest.raises(Interrupted):
                train_streamed(stream_files)
        assert train_streamed(stream_files) == train_stored()["weights_digest"]
