"""Trainings of toy samples in arrival order, from the references of a control plane."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from resumable_runs import RecordingStrategy
from torch import Tensor
from training_toys import eval_loader, ragged_samples
from waiting import HANG_S

from draftworks.config.registry_files import TrainingSpec
from draftworks.features.contracts import KeyedFeatureStore, SampleRef, TrainBatch
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.stream.arrival_producer import SOURCE, SourceFact
from draftworks.stream.arrival_stream import ArrivalStream, RefQueue
from draftworks.stream.controller import ControlPlane, DataFlowController, resolve_control_plane
from draftworks.stream.step_acks import FreeAt
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


def put_samples(store: KeyedFeatureStore, samples: Mapping[str, dict[str, Tensor]] = SAMPLES) -> list[SampleRef]:
    """Store toy samples with their tokens; returns their references in another order than their names."""
    refs = []
    for name, tensors in samples.items():
        keys = {each: f"{name}-{each}" for each in tensors}
        refs.append(store.put(SampleRef(name, "run", name, "", keys, {}, num_tokens=len(tensors["last"])), tensors))
    order = torch.randperm(len(refs), generator=torch.Generator().manual_seed(5))
    return [refs[index] for index in order.tolist()]


def publish(controller: DataFlowController, refs: Sequence[SampleRef], ends: bool = True) -> None:
    """Commit references as producers do; `ends`: no more will come."""
    controller.commit_samples(refs, frees=0)
    if ends:
        controller.record_fact(SOURCE, json.dumps(vars(SourceFact("toy", len(refs), 0.1, SPEC.global_batch_size))))


@dataclass(frozen=True)
class ArrivalRun:
    """A training in a folder: every one that it fits goes on from the newest checkpoint there.

    Attributes:
        queue: of a training that repeats another one.
    """

    folder: Path
    spec: TrainingSpec = SPEC
    free_at: FreeAt = "never"
    queue: RefQueue | None = None
    shared: KeyedFeatureStore | None = None
    fits: list[Trainer] = field(default_factory=list)

    @property
    def store(self) -> KeyedFeatureStore:
        return self.shared or KeyedSharedDirStore(self.folder / "store")

    def plane(self) -> ControlPlane:
        return resolve_control_plane("disaggregated", "run", self.folder / "control.sqlite", consumer_lease_s=1.0)

    def publish(self, refs: Sequence[SampleRef] | None = None, ends: bool = True) -> ArrivalRun:
        publish(self.plane().controller, put_samples(self.store) if refs is None else refs, ends)
        return self

    def read_order(self) -> list[tuple[str, ...]]:
        return [step.sample_ids for step in self.plane().controller.read_order()]

    def fit(
        self,
        *,
        stop_after: int | None = None,
        unheard: int = 0,
        on_step: Callable[[int], None] | None = None,
        on_saved: Callable[[int], None] | None = None,
    ) -> Trainer:
        """Train; `stop_after` says when a signal comes.

        Args:
            unheard: how often the signal is looked for before it comes.
            on_step, on_saved: called after each acknowledged step, and after each recorded checkpoint.
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
        stream = ArrivalStream(
            *(self.store, strategy, self.spec, self.plane(), 0 if latest is None else read_record(latest).step),
            free_at=self.free_at,
            stop_signal=stop_signal,
            idle_timeout_s=HANG_S,
            queue=self.queue,
        )
        listener = (
            None if stream.acks is None else _Watched(stream.acks, on_step or _do_nothing, on_saved or _do_nothing)
        )
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
            if not trainer.controller.stopped_by:
                stream.finish()
        return trainer


@dataclass(frozen=True)
class _Watched:
    """A step listener with others after it."""

    listener: Any
    on_acked: Callable[[int], None]
    on_saved: Callable[[int], None]

    def on_step(self, global_step: int) -> None:
        self.listener.on_step(global_step)
        self.on_acked(global_step)

    def on_checkpoint(self, global_step: int) -> None:
        self.listener.on_checkpoint(global_step)
        self.on_saved(global_step)


def _do_nothing(step: int) -> None:
    pass
