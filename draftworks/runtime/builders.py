"""Topologies of a training: where the features come from, where they are, and who keeps account of them.

Names are those of SpecForge's DataFlow runtime (pull requests 600 and 648). Every builder takes any strategy and any
target engine, and is called on every rank of the training's process group; producers have no process group.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draftworks.capture.engine import TargetEngine
from draftworks.capture.session import Confirmation
from draftworks.config.run_files import CaptureRun
from draftworks.dataflow.control_plane import DATAFLOW_COLOCATED, DISAGGREGATED, LOCAL_COLOCATED, ControlPlane
from draftworks.dataflow.controller import PAGE, DataFlowController
from draftworks.dataflow.merged_queue import MergedRefQueue
from draftworks.dataflow.metadata_store import MetadataStore
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import RefQueue, SampleRefQueue, StreamingRefQueue
from draftworks.dataflow.sqlite_metadata_store import InMemoryMetadataStore
from draftworks.dataflow.watermark import InFlight, Watermark
from draftworks.distributed.collectives import get_rank, get_world_size, run_on_every_rank
from draftworks.errors import ConfigError
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.memory_store import MemoryFeatureStore
from draftworks.runtime.arrival_producer import ArrivalWorker, OnlineProducer, TaskPool
from draftworks.runtime.arrival_stream import ArrivalStream, OpenQueue
from draftworks.runtime.interleaved import interleave
from draftworks.runtime.planned_loader import make_planned_loader
from draftworks.runtime.ref_sinks import ChannelSink, QueueSink, RefSink
from draftworks.runtime.row_sources import RowSource
from draftworks.runtime.step_acks import FreeAt, StepAcks, require_fresh
from draftworks.runtime.trainer_runtime import TrainerParts, TrainerRuntime, find_start, open_plane


@dataclass(frozen=True, kw_only=True)
class ProducerParts:
    """What producers of a stream need beside their store and their references' way.

    Attributes:
        capture: target, taps and settings of the capture; its folders are not used.
        streams: names of the features to store, as `DraftStrategy.feature_names` of the draft that is trained.
        load_engine: called once by each worker. Workers that share an engine need one that several threads may use.
        confirm: see `ArrivalWorker`.
    """

    source: RowSource
    capture: CaptureRun
    streams: Sequence[str]
    load_engine: Callable[[], TargetEngine]
    workers: int = 1
    confirm: Confirmation | None = None

    def make_producer(self, plane: ControlPlane, store: FeatureStore, sink: RefSink, name: str) -> OnlineProducer:
        pool = TaskPool(plane)
        workers = [
            ArrivalWorker(
                f"{name}-{number}",
                self.source,
                self.capture,
                self.streams,
                pool,
                store,
                sink,
                self.load_engine,
                self.confirm,
            )
            for number in range(self.workers)
        ]
        return OnlineProducer(workers, self.source, pool, sink)


def build_offline_runtime(
    parts: TrainerParts,
    refs: Sequence[SampleRef],
    store: FeatureStore,
    *,
    deployment_mode: str = LOCAL_COLOCATED,
    metadata_db_path: Path | None = None,
    metadata_store: MetadataStore | None = None,
    run_id: str = "draft",
    resume: bool = False,
    resume_from: Path | None = None,
    left_out: Sequence[int] = (),
) -> TrainerRuntime:
    """Train on stored features, in planned order.

    Args:
        refs, store: the set, as `OfflineManifestReader` lists it; `store` gives `input_ids` and `loss_mask` too, as
            `JoinedStore` does. It must retain what is released.
        deployment_mode: `local_colocated` keeps no account; else every step is acknowledged durably.
        metadata_db_path, metadata_store: the control plane of the other modes.
        resume, resume_from: see `find_start`. Without a control plane `parts.persistence.resume_from` is enough.
        left_out: see `TrainSchedule`.

    Raises:
        ConfigError: `resume_from` without `resume`, or a control plane that does not go with `deployment_mode`.
        StoreError: the control plane, a checkpoint or the set cannot be used.
    """
    durable = deployment_mode != LOCAL_COLOCATED
    if durable or resume or resume_from is not None:
        start = find_start(parts, resume, resume_from)
        parts = start.parts
    rank, world, training = get_rank(), get_world_size(), parts.training
    loader = make_planned_loader(refs, store, parts.strategy, training, rank, world, left_out, release_on_ack=durable)
    plane = open_plane(deployment_mode, run_id, metadata_db_path, metadata_store)
    if not durable:
        trainer = parts.make_trainer(loader)
        return TrainerRuntime(trainer, loader, nullcontext)
    assert loader.leases is not None
    steps_per_epoch = loader.schedule.steps
    if not resume:
        require_fresh(plane)
    acks = StepAcks(loader.leases, plane, steps_per_epoch)
    run_on_every_rank(partial(_commit_all, plane.controller, refs if rank == 0 else ()))
    trainer = parts.make_trainer(loader, acks)
    epochs = max(1, -(-trainer.controller.history.total_steps // steps_per_epoch))
    follow = partial(acks.follow, trainer.controller.global_step, store, uses=epochs, frees=False)
    return TrainerRuntime(trainer, loader, follow, acks.finish)


def build_disagg_offline_runtime(
    parts: TrainerParts,
    refs: Sequence[SampleRef],
    store: FeatureStore,
    *,
    metadata_db_path: Path | None = None,
    metadata_store: MetadataStore | None = None,
    run_id: str = "draft",
    resume: bool = False,
    resume_from: Path | None = None,
    left_out: Sequence[int] = (),
) -> TrainerRuntime:
    """Train on features that another process has put into a shared store, in planned order.

    The loader, the steps and the weights are those of `build_offline_runtime`: only the control plane differs.
    """
    return build_offline_runtime(
        parts,
        refs,
        store,
        deployment_mode=DISAGGREGATED,
        metadata_db_path=metadata_db_path,
        metadata_store=metadata_store,
        run_id=run_id,
        resume=resume,
        resume_from=resume_from,
        left_out=left_out,
    )


def build_online_runtime(
    parts: TrainerParts,
    produced: ProducerParts,
    *,
    store: FeatureStore | None = None,
    watermark: Watermark | None = None,
    order_log: Path | None = None,
    run_id: str = "draft",
    resume: bool = False,
    resume_from: Path | None = None,
    idle_timeout_s: float = 1800.0,
    join_timeout_s: float = 120.0,
) -> TrainerRuntime:
    """Capture and train in one process, in arrival order, with features in memory and no account of them.

    A resumed training captures anew what its checkpoint does not cover, in the order of the source.

    Args:
        store: by default a `MemoryFeatureStore`.
        watermark: of captured samples that no step has used; 256 samples by default.
        order_log: see `ArrivalStream.open`; by default beside the checkpoints.

    Raises:
        ConfigError: there are several ranks, the watermark is below a global batch, no `training.max_steps`, or
            `resume_from` without `resume`.
    """
    if get_world_size() > 1:
        raise ConfigError(
            f"build_online_runtime: expected one process, found {get_world_size()} ranks. Use build_disagg_online_producer "
            "and build_disagg_online_consumer"
        )
    chosen = store or MemoryFeatureStore()
    queues: list[SampleRefQueue] = []

    def open_queue(skip_ids: Iterable[str]) -> RefQueue:
        limits = (watermark or Watermark()).for_batches_of(parts.training.global_batch_size)
        queues.append(SampleRefQueue(limits, idle_timeout_s, skip_ids))
        return queues[0]

    plane = open_plane(LOCAL_COLOCATED, run_id)
    consumer = _build_consumer(parts, open_queue, chosen, plane, order_log, resume, resume_from, "step")
    # Tasks are kept in memory: the control plane of this mode retains nothing.
    tasks = ControlPlane(DataFlowController(run_id, InMemoryMetadataStore()), durable_ack=False)
    producer = produced.make_producer(tasks, chosen, QueueSink(queues[0]), "producer")
    return interleave(consumer, producer, join_timeout_s)


def build_disagg_online_producer(
    produced: ProducerParts,
    store: FeatureStore,
    channel: StreamingRefChannel,
    *,
    deployment_mode: str = DISAGGREGATED,
    metadata_db_path: Path | None = None,
    metadata_store: MetadataStore | None = None,
    run_id: str = "draft",
    watermark: Watermark | None = None,
    name: str = "producer",
) -> OnlineProducer:
    """Return the producers of a stream in arrival order, to be driven by `drive_producer`.

    Args:
        store: other processes read it; consume-once unless features are wanted later.
        channel: this process is its one writer. One that comes after a killed writer goes on where that was.
        deployment_mode: `local_colocated` keeps tasks in memory, so that a killed producer begins its source anew.
        metadata_db_path, metadata_store: the control plane, which the consumer uses too.
        watermark: limit of what is published and not acknowledged, in samples and bytes; 256 samples by default.

    Raises:
        ConfigError, StoreError: as `resolve_control_plane`.
    """
    if deployment_mode == LOCAL_COLOCATED:
        plane = ControlPlane(DataFlowController(run_id, InMemoryMetadataStore()), durable_ack=False)
    else:
        plane = open_plane(deployment_mode, run_id, metadata_db_path, metadata_store)
    return produced.make_producer(plane, store, ChannelSink(channel, watermark or Watermark()), name)


def build_disagg_online_consumer(
    parts: TrainerParts,
    store: FeatureStore,
    channel: StreamingRefChannel | Sequence[StreamingRefChannel],
    *,
    deployment_mode: str = DISAGGREGATED,
    metadata_db_path: Path | None = None,
    metadata_store: MetadataStore | None = None,
    run_id: str = "draft",
    order_log: Path | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    free_at: FreeAt | None = None,
) -> TrainerRuntime:
    """Train from a channel in arrival order, on any number of ranks.

    Args:
        store: the one that the producers fill.
        channel: of the producer; or one of each producer that shares the tasks of the control plane, see
            `MergedRefQueue`. One that never comes is not waited for.
        metadata_db_path, metadata_store: the control plane; acknowledged durably, unless `deployment_mode` is
            `local_colocated`.
        order_log: see `ArrivalStream.open`; by default beside the checkpoints.
        resume: continue from `resume_from`, or from the newest checkpoint: undo the acknowledgements after it, and leave
            out the samples that it covers.
        free_at: when a consume-once store frees samples. By default `checkpoint` where checkpoints are saved, since
            nobody captures them again, else `step`.

    Raises:
        ConfigError: `resume_from` without `resume`; or the control plane has a training of this `run_id` and `resume` is
            not set.
        StoreError: the channel has a consumer, or another part cannot be used.
    """
    plane = open_plane(deployment_mode, run_id, metadata_db_path, metadata_store)
    chosen = free_at or ("step" if parts.persistence is None else "checkpoint")
    channels = [channel] if isinstance(channel, StreamingRefChannel) else channel
    return _build_consumer(
        parts, partial(_open_channels, channels), store, plane, order_log, resume, resume_from, chosen
    )


def build_disagg_online_runtime(
    parts: TrainerParts,
    produced: ProducerParts,
    store: FeatureStore,
    channel_folder: Path,
    *,
    deployment_mode: str = DATAFLOW_COLOCATED,
    metadata_db_path: Path | None = None,
    metadata_store: MetadataStore | None = None,
    run_id: str = "draft",
    watermark: Watermark | None = None,
    order_log: Path | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    free_at: FreeAt | None = None,
    idle_timeout_s: float = 1800.0,
    join_timeout_s: float = 120.0,
) -> TrainerRuntime:
    """Producer and consumer of a channel in one process; `run` drives both, see `run_disagg_online_interleaved`.

    Raises:
        ConfigError, StoreError: as the builders of the two; also for several ranks.
    """
    if get_world_size() > 1:
        raise ConfigError(
            f"build_disagg_online_runtime: expected one process, found {get_world_size()} ranks. Start the producer as a "
            "process of its own"
        )
    limits = (watermark or Watermark()).for_batches_of(parts.training.global_batch_size)
    limits.require_batch(InFlight(parts.training.global_batch_size))
    channel = StreamingRefChannel(channel_folder, idle_timeout_s=idle_timeout_s, session=uuid.uuid4().hex)
    place = {
        "deployment_mode": deployment_mode,
        "metadata_db_path": metadata_db_path,
        "metadata_store": metadata_store,
        "run_id": run_id,
    }
    consumer = build_disagg_online_consumer(
        parts,
        store,
        channel,
        order_log=order_log,
        resume=resume,
        resume_from=resume_from,
        free_at=free_at,
        **place,
    )
    producer = build_disagg_online_producer(produced, store, channel, watermark=limits, **place)
    return interleave(consumer, producer, join_timeout_s)


def _build_consumer(
    parts: TrainerParts,
    open_queue: OpenQueue,
    store: FeatureStore,
    plane: ControlPlane,
    order_log: Path | None,
    resume: bool,
    resume_from: Path | None,
    free_at: FreeAt,
) -> TrainerRuntime:
    start = find_start(parts, resume, resume_from)
    if not resume:
        require_fresh(plane)
    if order_log is None and parts.persistence is not None:
        folder = parts.persistence.manager.folder
        order_log = folder.output_dir / f"{folder.run_id}.order.jsonl"
    stream = ArrivalStream.open(
        open_queue,
        store,
        parts.strategy,
        parts.training,
        plane,
        order_log,
        start.step,
        free_at,
        parts.stop_signal,
    )
    try:
        trainer = start.parts.make_trainer(stream.loader, stream.acks)
    except BaseException as error:
        stream.end(error)
        raise
    return TrainerRuntime(trainer, stream.loader, stream.follow, stream.acks.finish)


def _open_channels(channels: Sequence[StreamingRefChannel], skip_ids: Iterable[str]) -> RefQueue:
    with ExitStack() as opened:
        readers = []
        for channel in channels:
            readers.append(channel.open_consumer())
            opened.callback(readers[-1].release)
        if len(channels) == 1:
            queue = StreamingRefQueue(readers[0], skip_ids)
        else:
            idle_timeout_s = max(channel.idle_timeout_s for channel in channels)
            queue = MergedRefQueue([StreamingRefQueue(reader) for reader in readers], skip_ids, idle_timeout_s)
        opened.pop_all()  # released if the log of the order could not be read: another attempt may
    return queue


def _commit_all(controller: DataFlowController, refs: Sequence[SampleRef]) -> None:
    for start in range(0, len(refs), PAGE):
        controller.commit_samples(refs[start : start + PAGE])
