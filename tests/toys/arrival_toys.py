"""Trainings of toy samples in arrival order: from a folder's channel, or from a queue in memory."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from resumable_runs import RecordingStrategy
from torch import Tensor
from training_toys import eval_loader, ragged_samples

from draftworks.config.registry_files import TrainingSpec
from draftworks.dataflow.control_plane import ControlPlane, resolve_control_plane
from draftworks.dataflow.ref_channel import StreamingRefChannel
from draftworks.dataflow.ref_queues import RefQueue, SampleRefQueue, StreamingRefQueue
from draftworks.dataflow.watermark import Watermark
from draftworks.features.contracts import SampleRef, TrainBatch
from draftworks.features.shared_dir_store import SharedDirFeatureStore
from draftworks.runtime.arrival_stream import ArrivalStream
from draftworks.runtime.step_acks import FreeAt
from draftworks.training.checkpoint_files import read_record
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.trainer import Persistence, Trainer

SPEC = TrainingSpec(
    global_batch_size=4,
    micro_batch_size=2,
    max_steps=6,
    lr=0.02,
    compute_dtype="float32",
    log_every=1,
    eval_every=3,
    save_every=2,
    warmup_ratio=0.1,
)
SAMPLES = ragged_samples(27)
HELD_OUT = ragged_samples(5, seed=2)


class PackingStrategy(RecordingStrategy):
    """Packs samples into one row; their first tokens are not supervised, so none is predicted from another sample."""

    def pack(self, samples: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> TrainBatch:
        lengths = tuple(len(sample["input_ids"]) for sample in samples)
        joined = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}
        return TrainBatch(joined, tuple(sample_ids), sum(lengths), documents=lengths)


def put_samples(store: SharedDirFeatureStore, samples: Mapping[str, dict[str, Tensor]] = SAMPLES) -> list[SampleRef]:
    """Store toy samples with their tokens; returns their references in another order than their names."""
    refs = []
    for name, tensors in samples.items():
        keys = {each: each for each in tensors}
        refs.append(store.put(SampleRef(name, "run", name, "", keys, {}, num_tokens=len(tensors["last"])), tensors))
    order = torch.randperm(len(refs), generator=torch.Generator().manual_seed(5))
    return [refs[index] for index in order.tolist()]


def ended_queue(refs: Sequence[SampleRef], skip_ids: Iterable[str] = ()) -> SampleRefQueue:
    queue = SampleRefQueue(Watermark(samples=999), skip_ids=skip_ids)
    queue.put(refs)
    queue.close()
    return queue


def publish(channel: StreamingRefChannel, refs: Sequence[SampleRef]) -> None:
    with channel.open_writer() as writer:
        writer.publish_batch(refs)


@dataclass(frozen=True)
class ArrivalRun:
    """A training in a folder: every one that it fits goes on from the newest checkpoint there."""

    folder: Path
    store: SharedDirFeatureStore
    open_queue: Callable[[Iterable[str]], RefQueue]
    spec: TrainingSpec = SPEC
    free_at: FreeAt = "step"
    mode: str = "local_colocated"
    fits: list[Trainer] = field(default_factory=list)

    @classmethod
    def of_channel(cls, folder: Path, channel: StreamingRefChannel, **changes: Any) -> ArrivalRun:
        store = SharedDirFeatureStore(folder / "store", changes.pop("retain", True))

        def open_queue(skip_ids: Iterable[str]) -> RefQueue:
            return StreamingRefQueue(channel.open_consumer(), skip_ids)

        return replace(cls(folder, store, open_queue), **changes)

    @property
    def log(self) -> Path:
        return self.folder / "order.jsonl"

    def plane(self) -> ControlPlane:
        local = self.mode == "local_colocated"
        return resolve_control_plane(
            self.mode, "run", None if local else self.folder / "control.sqlite", consumer_lease_s=1.0
        )

    def fit(
        self,
        *,
        stop_after: int | None = None,
        unheard: int = 0,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> Trainer:
        """Train; `on_step` is called after each acknowledged step, and `stop_after` says when a signal comes.

        Args:
            unheard: how often the signal is looked for before it comes.
        """
        manager = CheckpointManager(self.folder / "checkpoints", "toy", save_async=self.spec.save_async)
        latest = manager.latest_dir()
        strategy = PackingStrategy()

        def stop_signal() -> int:
            if trainer is None or trainer.controller.global_step != stop_after:
                return 0
            looks.append(1)
            return signal.SIGTERM if len(looks) > unheard else 0

        trainer, looks = None, []
        stream = ArrivalStream.open(
            self.open_queue,
            self.store,
            strategy,
            self.spec,
            self.plane(),
            self.log,
            0 if latest is None else read_record(latest).step,
            self.free_at,
            stop_signal,
        )
        listener = _Watched(stream.acks, on_step)
        trainer = Trainer(
            strategy,
            stream.loader,
            eval_loader(strategy, HELD_OUT, 2),
            self.spec,
            torch.device("cpu"),
            persistence=Persistence(manager, {"strategy": "toy"}, latest),
            stop_signal=stop_signal,
            steps=listener,
        )
        self.fits.append(trainer)
        with stream.follow():
            trainer.fit()
        return trainer


@dataclass(frozen=True)
class _Watched:
    """A step listener with another one after it."""

    listener: Any
    then: Callable[[int], None]

    def on_step(self, global_step: int) -> None:
        self.listener.on_step(global_step)
        self.then(global_step)

    def on_checkpoint(self, global_step: int) -> None:
        self.listener.on_checkpoint(global_step)
