"""A training in arrival order: repeated from its log, killed, stopped and resumed, it gives the same weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from arrival_toys import HELD_OUT, SAMPLES, SPEC, ArrivalRun, ended_queue, publish, put_samples
from coverings import gate_or_long
from gloo_ranks import on_ranks
from resumable_runs import assert_bit_equal, assert_same_training, without_clocks
from safetensors.torch import load_file, save_file
from training_toys import ToyStrategy, eval_loader, ragged_samples, train_loader
from waiting import HANG_S

from draftworks.dataflow.order_log import read_order, replay_order
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.features.contracts import SampleRef
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.training.backend import ensure_process_group
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.trainer import Persistence, Trainer

PACKED = SPEC.model_copy(update={"pack_tokens": 24})


@pytest.fixture(scope="module")
def one_rank():
    with ensure_process_group(torch.device("cpu")):
        yield


@pytest.fixture
def store(tmp_path: Path) -> SharedDirFeatureStore:
    return SharedDirFeatureStore(tmp_path / "store", retain_on_release=True)


def from_list(folder: Path, store: SharedDirFeatureStore, refs: list[SampleRef], **changes) -> ArrivalRun:
    return ArrivalRun(folder, store, lambda skip: ended_queue(refs, skip), **changes)


def logged_samples(run: ArrivalRun, steps: int) -> list[tuple[str, ...]]:
    return [step.samples for step in read_order(run.log)][:steps]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("spec", [SPEC, PACKED], ids=["padded", "packed"])
def test_a_training_repeated_from_its_log_is_bit_identical(tmp_path: Path, store, spec):
    refs = put_samples(store)
    first = from_list(tmp_path / "first", store, refs, spec=spec)
    done = first.fit()
    again = ArrivalRun(tmp_path / "again", store, lambda skip: replay_order(first.log, refs, 4, skip), spec=spec)
    assert_same_training(again.fit(), done)
    assert done.controller.global_step == 6
    assert done.controller.history.evals[-1].step == 6
    assert logged_samples(first, 6) == [tuple(ref.sample_id for ref in refs[at : at + 4]) for at in range(0, 24, 4)]


def die_after(step: int):
    def die(done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return die


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["local_colocated", "disaggregated"])
def test_a_killed_training_of_a_consume_once_store_ends_as_the_undisturbed_one(tmp_path: Path, mode: str):
    trainings = []
    for name, deaths in (("straight", ()), ("killed", (1, 3, 5))):
        channel = StreamingRefChannel(tmp_path / name / "channel", idle_timeout_s=HANG_S)
        run = ArrivalRun.of_channel(tmp_path / name, channel, retain=False, free_at="checkpoint", mode=mode)
        publish(channel, put_samples(run.store))
        for step in deaths:
            with pytest.raises(KeyboardInterrupt):
                run.fit(on_step=die_after(step))
        trainings.append(run.fit())
        if mode == "disaggregated":
            controller = run.plane().controller
            assert controller.read_progress().acked_step == controller.read_progress().checkpoint_step == 6
            acked = [ref.sample_id for ref in controller.iterate_refs(acked=True)]
            assert sorted(acked) == sorted(each for step in logged_samples(run, 6) for each in step)
    assert_same_training(trainings[1], trainings[0])
    repeated = ArrivalRun(
        tmp_path / "repeated",
        SharedDirFeatureStore(tmp_path / "again", retain_on_release=True),
        lambda skip: replay_order(tmp_path / "killed" / "order.jsonl", again, 4, skip),
    )
    again = put_samples(repeated.store)
    assert_bit_equal(repeated.fit().weights(), trainings[0].weights())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", [1, 4])
def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path, store, step: int):
    refs = put_samples(store)
    straight = from_list(tmp_path / "straight", store, refs).fit()
    run = from_list(tmp_path / "stopped", store, refs)
    stopped = run.fit(stop_after=step)
    assert (stopped.controller.stopped_by, stopped.controller.global_step) == (signal.SIGTERM, step)
    assert_same_training(run.fit(), straight)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("save_every", [0, 2])
def test_a_stream_that_ends_early_ends_the_training_after_its_last_whole_batch(tmp_path: Path, store, save_every: int):
    refs = put_samples(store)[:15]
    spec = SPEC.model_copy(update={"save_every": save_every, "log_every": 10, "eval_every": 0})
    run = from_list(tmp_path / "short", store, refs, spec=spec)
    done = run.fit()
    history = done.controller.history
    assert (done.controller.global_step, history.steps, history.total_steps) == (3, 3, 6)
    assert [point.step for point in history.evals] == [3]
    assert CheckpointManager(tmp_path / "short" / "checkpoints", "toy").steps()[-1] == 3
    again = run.fit()
    assert_same_training(again, done)
    assert again.strategy.seen == []


@pytest.mark.usefixtures("one_rank")
def test_a_signal_ends_the_wait_for_references(tmp_path: Path, store):
    refs = put_samples(store)
    channel = StreamingRefChannel(tmp_path / "channel", idle_timeout_s=HANG_S)
    with channel.open_writer() as writer:
        writer.publish_batch(refs[:10])
        run = ArrivalRun.of_channel(tmp_path, channel)
        stopped = run.fit(stop_after=2, unheard=3)
    assert (stopped.controller.global_step, stopped.controller.stopped_by) == (2, signal.SIGTERM)


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_trained_is_one_error(tmp_path: Path, store):
    refs = put_samples(store)
    endless = SPEC.model_copy(update={"max_steps": None})
    with pytest.raises(ConfigError, match=r"training\.max_steps: expected the number of optimizer steps"):
        from_list(tmp_path / "endless", store, refs, spec=endless).fit()
    with pytest.raises(DataError, match="the stream ended before its first optimizer step"):
        from_list(tmp_path / "empty", store, refs[:3]).fit()
    store.retain_on_release = False
    store.release(store.get(refs[9])[1])
    with pytest.raises(StoreError, match=f"sample {refs[9].sample_id}.*is gone"):
        from_list(tmp_path / "gone", store, refs).fit()


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_of_one_order_are_not_resumed_in_the_other(tmp_path: Path, store):
    run = from_list(tmp_path, store, put_samples(store))
    run.fit()
    manager = CheckpointManager(tmp_path / "checkpoints", "toy")
    strategy = ToyStrategy()
    with pytest.raises(StoreError, match="position: .*this training"):
        Trainer(
            strategy,
            train_loader(strategy, ragged_samples(24), 2, 4),
            eval_loader(strategy, HELD_OUT, 2),
            SPEC,
            torch.device("cpu"),
            persistence=Persistence(manager, {"strategy": "toy"}, manager.latest_dir()),
        )


def _train_on_two_ranks(rank: int, folder: Path, packed: bool) -> None:
    store = SharedDirFeatureStore(folder / "ranks" / "store")
    refs = put_samples(store) if rank == 0 else []
    run = ArrivalRun(
        folder / "ranks",
        store,
        lambda skip: ended_queue(refs, skip),
        spec=PACKED if packed else SPEC.model_copy(update={"save_async": True}),
        mode="disaggregated",
        free_at="checkpoint",
    )
    trainer = run.fit()
    weights = trainer.weights()
    (folder / f"seen{rank}.json").write_text(json.dumps(trainer.strategy.seen))
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
        trainer.controller.history.save(folder / "history.json")
        controller = run.plane().controller
        assert len(list(controller.iterate_refs(acked=True))) == 24
        assert controller.read_progress().checkpoint_step == 6


@pytest.mark.parametrize("packed", gate_or_long([False, True], [True]), ids=["padded", "packed"])
def test_two_ranks_train_the_batches_of_one(tmp_path: Path, one_rank: None, packed: bool):
    on_ranks(2, tmp_path, _train_on_two_ranks, tmp_path, packed)
    store = SharedDirFeatureStore(tmp_path / "store", retain_on_release=True)
    alone = from_list(tmp_path / "alone", store, put_samples(store), spec=PACKED if packed else SPEC).fit()
    seen = [each for rank in range(2) for each in json.loads((tmp_path / f"seen{rank}.json").read_text())]
    assert sorted(map(tuple, seen)) == sorted(alone.strategy.seen)
    weights = alone.weights()
    for name, tensor in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)
    assert SharedDirFeatureStore(tmp_path / "ranks" / "store").health()["samples"] == len(SAMPLES) - 24
    assert len(without_clocks(alone.controller.history).train) == 6
