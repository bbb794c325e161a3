"""Topologies of one training give one draft: what differs is where features are and who keeps account."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from builder_toys import ARRIVAL, ROWS, make_producer_parts, make_trainer_parts, open_train_samples
from resumable_runs import assert_bit_equal
from stream_toys import TRAINING, StreamFiles
from waiting import HANG_S

from draftworks.dataflow.controller import DataFlowController
from draftworks.dataflow.order_log import read_order, replay_order
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.sqlite_metadata_store import SQLiteMetadataStore
from draftworks.dataflow.watermark import Watermark
from draftworks.errors import ConfigError, StoreError
from draftworks.features.joined_store import JoinedStore
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.runtime.arrival_producer import drive_producer
from draftworks.runtime.builders import (
    build_disagg_offline_runtime,
    build_disagg_online_consumer,
    build_disagg_online_producer,
    build_disagg_online_runtime,
    build_offline_runtime,
    build_online_runtime,
)
from draftworks.runtime.trainer_runtime import TrainerRuntime
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
        SharedDirFeatureStore(folder / "store"),
        folder / "channel",
        metadata_db_path=folder / "control.sqlite",
        **options,
    )
    runtime.run()
    return runtime


def test_online_training_is_the_same_in_every_topology_and_again_from_its_log(stream_files: StreamFiles):
    folder = stream_files.folder
    online = run_online(stream_files, folder / "online", watermark=Watermark(samples=6))
    interleaved = run_disagg(stream_files, folder / "interleaved", watermark=Watermark(samples=6))
    assert_same_draft(interleaved, online)
    controller = open_controller(folder / "interleaved" / "control.sqlite")
    assert (controller.read_progress().acked_step, controller.read_progress().checkpoint_step) == (5, 5)
    assert len(list(controller.iterate_refs(acked=True))) == 20

    # Two sides that share nothing but folders; the consumer retains what it reads.
    store = SharedDirFeatureStore(folder / "apart", retain_on_release=True)
    channel = StreamingRefChannel(folder / "apart-channel", idle_timeout_s=HANG_S)
    place = {"metadata_db_path": folder / "apart.sqlite"}
    producer = build_disagg_online_producer(make_producer_parts(stream_files, workers=2), store, channel, **place)
    driving = threading.Thread(target=drive_producer, args=[producer])
    driving.start()
    apart = build_disagg_online_consumer(
        make_trainer_parts(stream_files, checkpoints=folder / "apart-checkpoints"), store, channel, **place
    )
    apart.run()
    driving.join()
    log = folder / "apart-checkpoints" / "toy.order.jsonl"
    order = [sample_id for step in read_order(log) for sample_id in step.samples]
    assert len(order) == len(set(order)) == 20

    refs = list(open_controller(folder / "apart.sqlite").iterate_refs())
    assert sorted(ref.sample_id for ref in refs) == sorted(row.sample_id for row in ROWS)
    replayed = make_replay(stream_files, store, log, refs)
    replayed.run()
    assert_same_draft(replayed, apart)


def make_replay(files: StreamFiles, store, log: Path, refs) -> TrainerRuntime:
    """A training from the log of another one."""
    from draftworks.dataflow.control_plane import resolve_control_plane
    from draftworks.runtime.arrival_stream import ArrivalStream

    parts = make_trainer_parts(files)
    stream = ArrivalStream.open(
        lambda skip: replay_order(log, refs, ARRIVAL.global_batch_size, skip),
        store,
        parts.strategy,
        parts.training,
        resolve_control_plane("local_colocated", "again"),
    )
    return TrainerRuntime(parts.make_trainer(stream.loader, stream.acks), stream.loader, stream.follow)


def test_a_checkpoint_is_resumed_only_where_it_is_said(stream_files: StreamFiles):
    folder = stream_files.folder
    run_disagg(stream_files, folder / "first")
    parts = make_trainer_parts(stream_files, checkpoints=folder / "first")
    store, channel = (
        SharedDirFeatureStore(folder / "first" / "store"),
        StreamingRefChannel(folder / "first" / "channel"),
    )
    place = {"metadata_db_path": folder / "first" / "control.sqlite"}
    latest = parts.persistence.manager.latest_dir()
    with pytest.raises(ConfigError, match="expected resume=True beside it"):
        build_disagg_online_consumer(parts, store, channel, resume_from=latest, **place)
    with pytest.raises(ConfigError, match="has acknowledged 5 steps. Continue it with resume=True"):
        build_disagg_online_consumer(parts, store, channel, **place)
    elsewhere = make_trainer_parts(stream_files, checkpoints=folder / "other")
    with pytest.raises(StoreError, match="expected the log of a training's order"):
        build_disagg_online_consumer(elsewhere, store, channel, resume=True, resume_from=latest, **place)
    again = build_disagg_online_consumer(parts, store, channel, resume=True, **place)
    again.run()
    assert again.trainer.controller.global_step == 5


def test_modes_and_places_that_do_not_go_together_are_refused(stream_files: StreamFiles):
    parts = make_trainer_parts(stream_files)
    store, channel = SharedDirFeatureStore(stream_files.folder / "s"), StreamingRefChannel(stream_files.folder / "c")
    with pytest.raises(ConfigError, match="deployment_mode: expected one of"):
        build_disagg_online_consumer(parts, store, channel, deployment_mode="elsewhere")
    with pytest.raises(ConfigError, match="deployment_mode disaggregated: metadata_db_path"):
        build_disagg_online_consumer(parts, store, channel)
    with pytest.raises(ConfigError, match="resume=True: expected persistence"):
        build_disagg_online_consumer(parts, store, channel, deployment_mode="local_colocated", resume=True)
    with pytest.raises(ConfigError, match=r"watermark\.samples: expected at least one global batch"):
        build_online_runtime(parts, make_producer_parts(stream_files), watermark=Watermark(samples=3))
    with pytest.raises(StoreError, match="checkpoint"):
        build_online_runtime(
            make_trainer_parts(stream_files, checkpoints=stream_files.folder / "none"),
            make_producer_parts(stream_files),
            resume=True,
            resume_from=stream_files.folder / "nothing",
        )
