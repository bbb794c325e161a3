"""A training in arrival order: repeated from its log, killed, stopped and resumed, it gives the same weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from arrival_toys import HELD_OUT, SPEC, ArrivalRun, publish, put_samples
from coverings import gate_or_long
from gloo_ranks import on_ranks
from resumable_runs import assert_same_training, without_clocks
from safetensors.torch import load_file, save_file
from training_toys import ToyStrategy, eval_loader, ragged_samples, train_loader
from waiting import HANG_S

from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.features.contracts import KeyedFeatureStore
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.stream.arrival_stream import ListedRefs, RefReader
from draftworks.stream.metadata_store import PromptTask
from draftworks.training.backend import ensure_process_group
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.trainer import Persistence, Trainer

PACKED = SPEC.model_copy(update={"pack_tokens": 24})


@pytest.fixture(scope="module")
def one_rank():
    with ensure_process_group(torch.device("cpu")):
        yield


@pytest.fixture
def store(tmp_path: Path) -> KeyedSharedDirStore:
    return KeyedSharedDirStore(tmp_path / "store")


def repeat(run: ArrivalRun, folder: Path, store: KeyedFeatureStore) -> ArrivalRun:
    """A training from the record of another one."""
    refs = list(run.plane().controller.iterate_refs())
    order = [sample_id for step in run.read_order() for sample_id in step]
    return ArrivalRun(folder, run.spec, shared=store, queue=ListedRefs(refs, order))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("spec", [SPEC, PACKED], ids=["padded", "packed"])
def test_a_training_repeated_from_its_record_is_bit_identical(tmp_path: Path, store, spec):
    refs = put_samples(store)
    first = ArrivalRun(tmp_path / "first", spec, shared=store).publish(refs)
    done = first.fit()
    assert_same_training(repeat(first, tmp_path / "again", store).fit(), done)
    assert done.controller.global_step == 6
    assert done.controller.history.evals[-1].step == 6
    assert first.read_order() == [tuple(ref.sample_id for ref in refs[at : at + 4]) for at in range(0, 24, 4)]


def die_after(step: int):
    def die(done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return die


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("free_at", ["step", "checkpoint"])
def test_a_killed_training_that_frees_what_it_took_ends_as_the_undisturbed_one(tmp_path: Path, free_at: str):
    straight = ArrivalRun(tmp_path / "straight", free_at="checkpoint").publish()
    killed = ArrivalRun(tmp_path / "killed", free_at=free_at).publish()  # type: ignore[arg-type]
    for step in (1, 3, 5) if free_at == "checkpoint" else (2, 4):
        with pytest.raises(KeyboardInterrupt):
            killed.fit(on_step=die_after(step) if free_at == "checkpoint" else None, on_saved=die_after(step))
    done = killed.fit()
    assert_same_training(done, straight.fit())
    progress = killed.plane().controller.read_progress()
    assert progress.acked_step == progress.checkpoint_step == 6
    assert killed.read_order() == straight.read_order()
    for run in (straight, killed):
        assert run.store.health()["samples"] == 0, "what filled no batch goes at the end"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", [1, 4])
def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path, store, step: int):
    refs = put_samples(store)
    straight = ArrivalRun(tmp_path / "straight", shared=store).publish(refs).fit()
    run = ArrivalRun(tmp_path / "stopped", shared=store).publish(refs)
    stopped = run.fit(stop_after=step)
    assert (stopped.controller.stopped_by, stopped.controller.global_step) == (signal.SIGTERM, step)
    assert_same_training(run.fit(), straight)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("save_every", [0, 2])
def test_a_stream_that_ends_early_ends_the_training_after_its_last_whole_batch(tmp_path: Path, store, save_every: int):
    refs = put_samples(store)[:15]
    spec = SPEC.model_copy(update={"save_every": save_every, "log_every": 10, "eval_every": 0})
    run = ArrivalRun(tmp_path / "short", spec, shared=store).publish(refs)
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
    run = ArrivalRun(tmp_path, shared=store).publish(put_samples(store)[:10], ends=False)
    stopped = run.fit(stop_after=2, unheard=3)
    assert (stopped.controller.global_step, stopped.controller.stopped_by) == (2, signal.SIGTERM)


def test_tasks_that_are_added_while_the_reader_looks_do_not_end_the_stream(tmp_path: Path, monkeypatch):
    controller = ArrivalRun(tmp_path).plane().controller
    reader = RefReader(controller, SPEC.global_batch_size, idle_timeout_s=HANG_S)
    read_facts, count_tasks = controller.read_facts, controller.count_tasks
    looked: list[str] = []

    def begin_after_the_first(look):
        def looks(*given):
            found = look(*given)
            if not looked:
                looked.append(look.__name__)
                controller.add_tasks([PromptTask("task", "run", ("a",))])
                publish(controller, [])
            return found

        return looks

    monkeypatch.setattr(controller, "read_facts", begin_after_the_first(read_facts))
    monkeypatch.setattr(controller, "count_tasks", begin_after_the_first(count_tasks))
    assert reader.get(1, 0.0) == []
    assert looked
    assert not reader.is_drained


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_trained_is_one_error(tmp_path: Path, store):
    refs = put_samples(store)
    endless = SPEC.model_copy(update={"max_steps": None})
    with pytest.raises(ConfigError, match=r"training\.max_steps: expected the number of optimizer steps"):
        ArrivalRun(tmp_path / "endless", endless, shared=store).publish(refs).fit()
    with pytest.raises(DataError, match="the stream ended before its first optimizer step"):
        ArrivalRun(tmp_path / "empty", shared=store).publish(refs[:3]).fit()
    store.free([f"{refs[9].sample_id}-last"])
    with pytest.raises(StoreError, match=f"gone, and no task of the run can make them again: {refs[9].sample_id}"):
        ArrivalRun(tmp_path / "gone", shared=store).publish(refs).fit()
    with pytest.raises(StoreError, match="names 1 samples without a reference, such as x"):
        ListedRefs(refs, ["x"])


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_of_one_order_are_not_resumed_in_the_other(tmp_path: Path, store):
    ArrivalRun(tmp_path, shared=store).publish(put_samples(store)).fit()
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
    spec = PACKED if packed else SPEC.model_copy(update={"save_async": True})
    run = ArrivalRun(folder / "ranks", spec, "checkpoint")
    if rank == 0:
        run.publish()
    dist.barrier()
    trainer = run.fit()
    weights = trainer.weights()
    (folder / f"seen{rank}.json").write_text(json.dumps(trainer.strategy.seen))
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
        controller = run.plane().controller
        assert len(list(controller.iterate_refs(acked=True))) == 24
        assert controller.read_progress().checkpoint_step == 6


@pytest.mark.parametrize("packed", gate_or_long([False, True], [True]), ids=["padded", "packed"])
def test_two_ranks_train_the_batches_of_one(tmp_path: Path, one_rank: None, packed: bool):
    on_ranks(2, tmp_path, _train_on_two_ranks, tmp_path, packed)
    alone = ArrivalRun(tmp_path / "alone", PACKED if packed else SPEC).publish().fit()
    seen = [each for rank in range(2) for each in json.loads((tmp_path / f"seen{rank}.json").read_text())]
    assert sorted(map(tuple, seen)) == sorted(alone.strategy.seen)
    weights = alone.weights()
    for name, tensor in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)
    assert KeyedSharedDirStore(tmp_path / "ranks" / "store").health()["samples"] == 0
    assert len(without_clocks(alone.controller.history).train) == 6
