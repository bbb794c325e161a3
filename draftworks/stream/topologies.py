"""Topologies of a training: where the features come from, where they are, and who keeps account of them.

Every builder takes any strategy and any target engine, and is called on every rank of the training's process group;
producers have no process group. `plane` are the options of `resolve_control_plane`, such as `lease_s`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftworks.distributed.collectives import get_rank, get_world_size, run_on_every_rank
from draftworks.distributed.stop_signals import block_stop_signals
from draftworks.drafts.strategy import make_planned_loader
from draftworks.errors import ConfigError, StoreError
from draftworks.features.contracts import FeatureStore, KeyedFeatureStore, SampleRef
from draftworks.features.memory_store import MemoryFeatureStore
from draftworks.features.schedule import TrainSchedule
from draftworks.stream.arrival_producer import OnlineProducer, ProducerParts, ShouldStop, drive_producer
from draftworks.stream.arrival_stream import ArrivalStream
from draftworks.stream.controller import (
    DATAFLOW_COLOCATED,
    DISAGGREGATED,
    LOCAL_COLOCATED,
    PAGE,
    ControlPlane,
    DataFlowController,
    resolve_control_plane,
)
from draftworks.stream.metadata_store import IDLE_TIMEOUT_S, Watermark
from draftworks.stream.step_acks import FreeAt, StepAcks, require_fresh
from draftworks.stream.trainer_runtime import TrainerParts, TrainerRuntime, find_start, open_plane
from draftworks.training.history import History

JOIN_TIMEOUT_S = 120.0
log = logging.getLogger(__name__)


def build_offline_runtime(
    parts: TrainerParts,
    refs: Sequence[SampleRef],
    store: FeatureStore,
    *,
    deployment_mode: str = LOCAL_COLOCATED,
    resume: bool = False,
    resume_from: Path | None = None,
    left_out: Sequence[int] = (),
    **plane: Any,
) -> TrainerRuntime:
    """Train on stored features, in planned order.

    Args:
        refs, store: the set, as `OfflineManifestReader` lists it; `store` gives `input_ids` and `loss_mask` too, as
            `JoinedStore` does.
        deployment_mode: `local_colocated` keeps no account; else every step is acknowledged durably.
        resume, resume_from: see `find_start`. Without a control plane `parts.persistence.resume_from` is enough.
        left_out: see `TrainSchedule`.

    Raises:
        ConfigError: `resume_from` without `resume`, or a control plane that does not go with `deployment_mode`.
        StoreError: the control plane, a checkpoint or the set cannot be used.
    """
    durable = deployment_mode != LOCAL_COLOCATED
    if durable or resume or resume_from is not None:
        parts, _ = find_start(parts, resume, resume_from)
    loader = make_planned_loader(refs, store, parts.strategy, parts.training, get_rank(), get_world_size(), left_out)
    opened = open_plane(deployment_mode, **plane)
    if not durable:
        return TrainerRuntime(parts.make_trainer(loader), loader)
    schedule = loader.schedule
    assert isinstance(schedule, TrainSchedule), "of a training"
    steps = schedule.steps
    if not resume:
        require_fresh(opened)
    run_on_every_rank(partial(_commit_all, opened.controller, refs if get_rank() == 0 else ()))

    def list_samples(global_step: int) -> list[SampleRef]:
        epoch, step = divmod(global_step - 1, steps)
        return [refs[index] for index in schedule.samples_of_steps(epoch)[step]]

    acks = StepAcks(opened, None, list_samples, steps)
    trainer = parts.make_trainer(loader, acks)
    epochs = max(1, -(-trainer.controller.history.total_steps // steps))
    return TrainerRuntime(
        trainer, loader, partial(acks.follow, trainer.controller.global_step, store, epochs), acks.finish
    )


def build_disagg_offline_runtime(
    parts: TrainerParts, refs: Sequence[SampleRef], store: FeatureStore, **options: Any
) -> TrainerRuntime:
    """As `build_offline_runtime`, with a control plane, for features that another process has put into a shared store."""
    return build_offline_runtime(parts, refs, store, deployment_mode=DISAGGREGATED, **options)


def build_online_runtime(
    parts: TrainerParts,
    produced: ProducerParts,
    *,
    store: KeyedFeatureStore | None = None,
    watermark: Watermark | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    run_id: str = "draft",
) -> TrainerRuntime:
    """Capture and train in one process, in arrival order, with features in memory.

    The account of a training with checkpoints is kept beside them. One that resumes captures anew what its checkpoint
    does not cover.

    Args:
        store: by default a `MemoryFeatureStore`.
        watermark: of samples that no step has used; 256 samples by default.

    Raises:
        ConfigError: as `build_disagg_online_runtime`.
    """
    place: dict[str, Any] = {"deployment_mode": LOCAL_COLOCATED}
    if parts.persistence is not None:
        folder = parts.persistence.manager.folder
        database = folder.output_dir / f"{folder.run_id}.control.sqlite"
        place = {"deployment_mode": DATAFLOW_COLOCATED, "metadata_db_path": database}
    return build_disagg_online_runtime(
        *(parts, produced, store or MemoryFeatureStore()),
        watermark=watermark,
        resume=resume,
        resume_from=resume_from,
        free_at="step",
        idle_timeout_s=idle_timeout_s,
        join_timeout_s=join_timeout_s,
        run_id=run_id,
        **place,
    )


def build_disagg_online_producer(
    produced: ProducerParts,
    store: KeyedFeatureStore,
    *,
    global_batch_size: int,
    watermark: Watermark | None = None,
    name: str = "producer",
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    deployment_mode: str = DISAGGREGATED,
    **plane: Any,
) -> OnlineProducer:
    """Return the producers of a stream in arrival order, to be driven by `drive_producer`; any number of processes may.

    Args:
        store: other processes read it.
        global_batch_size: `training.global_batch_size` of the trainer.
        watermark: limit of what is leased, or committed and not acknowledged; 256 samples by default.

    Raises:
        ConfigError: the watermark is below a global batch, or as `resolve_control_plane`.
        StoreError: as `resolve_control_plane`.
    """
    opened = resolve_control_plane(_require_shared(deployment_mode), **{"run_id": "draft", **plane})
    return produced.make_producer(
        opened.controller, store, watermark or Watermark(), global_batch_size, name, idle_timeout_s
    )


def build_disagg_online_consumer(
    parts: TrainerParts,
    store: KeyedFeatureStore,
    *,
    resume: bool = False,
    resume_from: Path | None = None,
    free_at: FreeAt | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    deployment_mode: str = DISAGGREGATED,
    **plane: Any,
) -> TrainerRuntime:
    """Train what producers commit, in arrival order, on any number of ranks.

    Args:
        store: the one that the producers fill.
        resume: continue from `resume_from`, or from the newest checkpoint: undo the acknowledgements after it, and leave
            out the samples that it covers.
        free_at: when features are freed. By default `checkpoint` where checkpoints are saved, else `step`. What a
            resumed training repeats and no longer finds is captured again, by producers that are there.

    Raises:
        ConfigError: `resume_from` without `resume`; or the control plane has a training of this `run_id` and `resume` is
            not set; or the producers were told another global batch.
        StoreError: a part cannot be used.
    """
    opened = open_plane(_require_shared(deployment_mode), **plane)
    return _build_consumer(parts, store, opened, resume, resume_from, free_at, idle_timeout_s)


def build_disagg_online_runtime(
    parts: TrainerParts,
    produced: ProducerParts,
    store: KeyedFeatureStore,
    *,
    watermark: Watermark | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    free_at: FreeAt | None = None,
    idle_timeout_s: float = IDLE_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    deployment_mode: str = DATAFLOW_COLOCATED,
    **plane: Any,
) -> TrainerRuntime:
    """Producers and consumer in one process; `run` drives both, see `run_disagg_online_interleaved`.

    Raises:
        ConfigError: there are several ranks, or as the builders of the two.
        StoreError: as the builders of the two.
    """
    if get_world_size() > 1:
        raise ConfigError(
            f"expected one process, found {get_world_size()} ranks. Start the producer as a process of its own: "
            "build_disagg_online_producer and build_disagg_online_consumer"
        )
    opened = open_plane(deployment_mode, **plane)
    producer = produced.make_producer(
        *(opened.controller, store, watermark or Watermark(), parts.training.global_batch_size),
        idle_timeout_s=idle_timeout_s,
    )
    consumer = _build_consumer(parts, store, opened, resume, resume_from, free_at, idle_timeout_s)
    return interleave(consumer, producer, join_timeout_s)


def run_disagg_online_interleaved(
    consumer: TrainerRuntime, producer: OnlineProducer, join_timeout_s: float = JOIN_TIMEOUT_S
) -> History:
    """Train on this thread while producers run on others.

    A source that is exhausted ends the stream, and the trainer trains what is left in it. A trainer that is done first
    tells the producers to stop.

    Args:
        join_timeout_s: how long the producers may take to stop once training is over.

    Raises:
        BaseException: the producers' own error, where they failed before training was over; else what training raises.
        StoreError: the producers did not stop in time.
    """
    return interleave(consumer, producer, join_timeout_s).run()


def interleave(consumer: TrainerRuntime, producer: OnlineProducer, join_timeout_s: float) -> TrainerRuntime:
    """Return the runtime that does so; see `run_disagg_online_interleaved`."""
    stream = consumer.stream
    assert stream is not None, "of a training in arrival order"

    @contextmanager
    def follow() -> Iterator[None]:
        with consumer.follow(), produce_beside(partial(drive_producer, producer), stream.reader.fail, join_timeout_s):
            yield

    return replace(consumer, follow=follow)


@contextmanager
def produce_beside(
    drive: Callable[[ShouldStop], object], on_failure: Callable[[BaseException], None], join_timeout_s: float
) -> Iterator[None]:
    """Context with a producer in a thread, which is told to stop at its end; its error is raised there."""
    stop, failures = threading.Event(), []

    def work() -> None:
        block_stop_signals()
        try:
            drive(stop.is_set)
        except BaseException as error:
            failures.append(error)
            on_failure(error)

    def end(error: BaseException | None) -> None:
        stop.set()
        thread.join(join_timeout_s)
        if failures:
            raise failures[0] from (None if error is failures[0] else error)
        if thread.is_alive():
            late = StoreError(
                f"the producer has not stopped within {join_timeout_s:g} s after training was over: its engine hangs, or "
                "takes longer for a batch. Look at its log, or raise join_timeout_s"
            )
            if error is None:
                raise late
            log.warning("%s", late)

    thread = threading.Thread(target=work, name="producer", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        end(error)
        raise
    end(None)


def _build_consumer(
    parts: TrainerParts,
    store: KeyedFeatureStore,
    plane: ControlPlane,
    resume: bool,
    resume_from: Path | None,
    free_at: FreeAt | None,
    idle_timeout_s: float,
) -> TrainerRuntime:
    parts, start = find_start(parts, resume, resume_from)
    if not resume:
        require_fresh(plane)
    chosen = free_at or ("step" if parts.persistence is None else "checkpoint")
    stream = ArrivalStream(
        *(store, parts.strategy, parts.training, plane, start, chosen, parts.stop_signal, idle_timeout_s)
    )
    trainer = parts.make_trainer(stream.loader, stream.acks)
    return TrainerRuntime(trainer, stream.loader, stream.follow, stream.finish, stream)


def _require_shared(deployment_mode: str) -> str:
    """Return the mode if processes can share its control plane, which is the way of their references."""
    if deployment_mode == LOCAL_COLOCATED:
        raise ConfigError(
            f"deployment_mode {LOCAL_COLOCATED}: producer and trainer are in one process there, by build_online_runtime. "
            f"Between processes, references go through the control plane of {DISAGGREGATED}"
        )
    return deployment_mode


def _commit_all(controller: DataFlowController, refs: Sequence[SampleRef]) -> None:
    for start in range(0, len(refs), PAGE):
        controller.commit_samples(refs[start : start + PAGE])
