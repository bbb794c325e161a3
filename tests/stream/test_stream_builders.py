"""Topologies of one training give one draft: what differs is where features are and who keeps account."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builder_toys import ARRIVAL, ROWS, make_producer_parts, make_trainer_parts, open_train_samples
from resumable_runs import assert_bit_equal
from stream_toys import TRAINING, StreamFiles

from draftworks.errors import ConfigError
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.wrapped_store import JoinedStore
from draftworks.stream.arrival_stream import ArrivalStream, ListedRefs
from draftworks.stream.controller import DataFlowController, resolve_control_plane
from draftworks.stream.metadata_store import Watermark
from draftworks.stream.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.stream.topologies import (
    TrainerRuntime,
    build_disagg_offline_runtime,
    build_disagg_online_consumer,
    build_disagg_online_producer,
    build_disagg_online_runtime,
    build_offline_runtime,
    build_online_runtime,
    drive_producer,
)
from draftworks.training.backend import ensure_process_group


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    with ensure_process_group(torch.device("cpu")):
        yield


def losses(runtime: TrainerRuntime) -> list[float | None]:
    return [point.loss for point in runtime.trainer.controller.history.train]


def open_controller(path: Path) -> DataFlowController:
    return DataFlowController("draft", SQLiteMetadataStore(path))


def assert_same_draft(found: TrainerRuntime, expected: TrainerRuntime) -> None:
    assert losses(found) == losses(expected)
    assert len(losses(found)) > 3
    assert_bit_equal(found.trainer.weights(), expected.trainer.weights())


def test_disaggregated_offline_training_is_the_colocated_one_and_acknowledges_every_step(stream_files: StreamFiles):
    parts = make_trainer_parts(stream_files, TRAINING)
    samples = open_train_samples(stream_files, parts)
    colocated = build_offline_runtime(parts, samples.refs, samples.store)
    colocated.run()

    shared = KeyedSharedDirStore(stream_files.folder / "shared")
    refs = []
    for ref in samples.refs:
        tensors, handle = samples.store.get(ref)
        refs.append(shared.put(ref, {name: tensors[name] for name in ref.feature_keys}))
        samples.store.release(handle)
    database = stream_files.folder / "offline.sqlite"
    disaggregated = build_disagg_offline_runtime(
        make_trainer_parts(stream_files, TRAINING),
        refs,
        JoinedStore(shared, samples.tokens),
        metadata_db_path=database,
    )
    trainer, loader, run = disaggregated
    history = run()
    assert_same_draft(disaggregated, colocated)
    assert history.steps == trainer.controller.global_step == 6
    controller = open_controller(database)
    assert controller.read_progress().acked_step == 6
    taken = {ref.sample_id for ref in controller.iterate_refs(acked=True)}
    assert taken == {
        samples.refs[index].sample_id for epoch in range(2) for index in loader.schedule.samples_of_steps(epoch).ravel()
    }
    assert not shared.find_missing(key for ref in refs for key in ref.feature_keys.values()), "stored features stay"


def run_online(files: StreamFiles, folder: Path, **options) -> TrainerRuntime:
    runtime = build_online_runtime(make_trainer_parts(files, checkpoints=folder), make_producer_parts(files), **options)
    runtime.run()
    return runtime


def run_disagg(files: StreamFiles, folder: Path, **options) -> TrainerRuntime:
    runtime = build_disagg_online_runtime(
        make_trainer_parts(files, checkpoints=folder),
        make_producer_parts(files),
        KeyedSharedDirStore(folder / "store"),
        metadata_db_path=folder / "control.sqlite",
        **options,
    )
    runtime.run()
    return runtime


def test_online_training_is_the_same_in_every_topology_and_again_from_its_record(stream_files: StreamFiles):
    folder = stream_files.folder
    online = run_online(stream_files, folder / "online", watermark=Watermark(samples=6))
    interleaved = run_disagg(stream_files, folder / "interleaved", watermark=Watermark(samples=6))
    assert_same_draft(interleaved, online)
    controller = open_controller(folder / "interleaved" / "control.sqlite")
    assert (controller.read_progress().acked_step, controller.read_progress().checkpoint_step) == (5, 5)
    assert len(list(controller.iterate_refs(acked=True))) == 20
    assert KeyedSharedDirStore(folder / "interleaved" / "store").health()["samples"] == 0

    # Two sides that share nothing but a store and a control plane; the consumer retains what it reads.
    store, place = KeyedSharedDirStore(folder / "apart"), {"metadata_db_path": folder / "apart.sqlite"}
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files, workers=2), store, global_batch_size=ARRIVAL.global_batch_size, **place
    )
    driving = threading.Thread(target=drive_producer, args=[producer])
    driving.start()
    apart = build_disagg_online_consumer(
        make_trainer_parts(stream_files, checkpoints=folder / "apart-checkpoints"), store, free_at="never", **place
    )
    apart.run()
    driving.join()
    controller = open_controller(folder / "apart.sqlite")
    order = [sample_id for step in controller.read_order() for sample_id in step.sample_ids]
    assert len(order) == len(set(order)) == 20
    refs = list(controller.iterate_refs())
    assert sorted(ref.sample_id for ref in refs) == sorted(row.sample_id for row in ROWS)
    parts = make_trainer_parts(stream_files)
    stream = ArrivalStream(
        *(store, parts.strategy, parts.training, resolve_control_plane("local_colocated", "again")),
        queue=ListedRefs(refs, order),
    )
    replayed = TrainerRuntime(parts.make_trainer(stream.loader, stream.acks), stream.loader, stream.follow)
    replayed.run()
    assert_same_draft(replayed, apart)


def test_a_checkpoint_is_resumed_only_where_it_is_said(stream_files: StreamFiles):
    folder = stream_files.folder
    run_disagg(stream_files, folder / "first")
    parts = make_trainer_parts(stream_files, checkpoints=folder / "first")
    store = KeyedSharedDirStore(folder / "first" / "store")
    place = {"metadata_db_path": folder / "first" / "control.sqlite"}
    latest = parts.persistence.manager.latest_dir()
    with pytest.raises(ConfigError, match="expected resume=True beside it"):
        build_disagg_online_consumer(parts, store, resume_from=latest, **place)
    with pytest.raises(ConfigError, match="has acknowledged 5 steps. Continue it with resume=True"):
        build_disagg_online_consumer(parts, store, **place)
    again = build_disagg_online_consumer(parts, store, resume=True, **place)
    again.run()
    assert again.trainer.controller.global_step == 5


def test_modes_and_places_that_do_not_go_together_are_refused(stream_files: StreamFiles):
    parts = make_trainer_parts(stream_files)
    store = KeyedSharedDirStore(stream_files.folder / "s")
    with pytest.raises(ConfigError, match="deployment_mode: expected one of"):
        build_disagg_online_consumer(parts, store, deployment_mode="elsewhere")
    with pytest.raises(ConfigError, match="deployment_mode disaggregated: metadata_db_path"):
        build_disagg_online_consumer(parts, store)
    with pytest.raises(ConfigError, match="deployment_mode local_colocated: producer and trainer are in one process"):
        build_disagg_online_consumer(parts, store, deployment_mode="local_colocated")
    with pytest.raises(ConfigError, match="resume=True: expected persistence"):
        build_disagg_online_consumer(parts, store, metadata_db_path=stream_files.folder / "x", resume=True)


PLACE_OPTIONS = {"lease_s": 7.0, "consumer_lease_s": 5.0, "max_attempts": 4}


def test_leases_and_attempts_are_set_where_a_runtime_is_built(stream_files: StreamFiles):
    producer = build_disagg_online_producer(
        make_producer_parts(stream_files),
        KeyedSharedDirStore(stream_files.folder / "s"),
        global_batch_size=4,
        metadata_db_path=stream_files.folder / "x",
        **PLACE_OPTIONS,
    )
    assert (producer.controller.lease_s, producer.controller.consumer_lease_s) == (7.0, 5.0)
    producer.add_tasks()
    for attempt in range(4):
        for lease in producer.controller.lease_tasks("worker", 99):
            producer.controller.fail_task(lease, f"attempt {attempt}")
    assert {len(letter.reasons) for letter in producer.controller.read_dead_letters()} == {4}


BELOW = [
    (Watermark(samples=3), "samples"),
    (Watermark(samples=None, bytes=1000), "bytes"),
    (Watermark(samples=1, steps=1), "samples"),
]


@pytest.mark.parametrize(("watermark", "name"), BELOW)
def test_a_watermark_below_a_batch_is_refused_in_one_and_in_two_processes_before_anything_starts(
    stream_files: StreamFiles, watermark: Watermark, name: str
):
    def fail() -> None:
        raise AssertionError("the engine was loaded")

    produced = make_producer_parts(stream_files, engine=fail)
    store, place = KeyedSharedDirStore(stream_files.folder / "s"), {"metadata_db_path": stream_files.folder / "x"}
    expected = rf"watermark\.{name}: expected at least one global batch"
    with pytest.raises(ConfigError, match=expected):
        build_online_runtime(make_trainer_parts(stream_files), produced, watermark=watermark)
    with pytest.raises(ConfigError, match=expected):
        build_disagg_online_runtime(make_trainer_parts(stream_files), produced, store, watermark=watermark, **place)
    with pytest.raises(ConfigError, match=expected):
        build_disagg_online_producer(produced, store, global_batch_size=4, watermark=watermark, **place)


def test_a_trainer_of_another_global_batch_than_its_producers_were_told_is_refused(stream_files: StreamFiles):
    store, place = KeyedSharedDirStore(stream_files.folder / "s"), {"metadata_db_path": stream_files.folder / "x"}
    build_disagg_online_producer(make_producer_parts(stream_files), store, global_batch_size=8, **place).add_tasks()
    with pytest.raises(ConfigError, match="expected global_batch_size 8, as its producers were told, found 4"):
        build_disagg_online_consumer(make_trainer_parts(stream_files), store, **place)


def test_what_means_nothing_is_one_error_before_anything_starts(stream_files: StreamFiles):
    with pytest.raises(ConfigError, match=r"workers: expected at least 1, found 0"):
        make_producer_parts(stream_files, workers=0)
    with pytest.raises(ConfigError, match=r"streams: expected some of hf2, hf4, hf5, last, .*found \['hf3'\]"):
        replace(make_producer_parts(stream_files), streams=("hf3", "last"))
    for seconds in (0, -1):
        with pytest.raises(ConfigError, match="idle_timeout_s: expected more than 0"):
            build_online_runtime(
                make_trainer_parts(stream_files), make_producer_parts(stream_files), idle_timeout_s=seconds
            )
