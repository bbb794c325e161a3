"""A trainer with what surrounds its training, the same for every topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftworks.config.registry_files import TrainingSpec
from draftworks.distributed.collectives import get_rank, run_on_every_rank
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.features.contracts import FeatureStore, SampleRef
from draftworks.features.loader import FeatureDataLoader, TrainingLoader
from draftworks.features.packing import PackLimits
from draftworks.stream.arrival_stream import ArrivalStream
from draftworks.stream.controller import LOCAL_COLOCATED, ControlPlane, resolve_control_plane
from draftworks.training.checkpoint_files import read_record
from draftworks.training.history import History, StepListener, TrainingObserver
from draftworks.training.trainer import Persistence, Trainer


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What a trainer needs beside its training data. Arguments of `Trainer`.

    Attributes:
        heldout: loader of the held-out set.
    """

    strategy: DraftStrategy
    training: TrainingSpec
    heldout: FeatureDataLoader
    device: torch.device
    observers: Sequence[TrainingObserver] = ()
    persistence: Persistence | None = None
    stop_signal: Callable[[], int] = lambda: 0
    evaluates_start: bool = False

    def make_trainer(self, loader: TrainingLoader, steps: StepListener | None = None) -> Trainer:
        """Return the trainer of this rank. A collective. Raises ConfigError, StoreError as `Trainer`."""
        return Trainer(
            *(self.strategy, loader, self.heldout, self.training, self.device, self.observers, self.persistence),
            *(self.stop_signal, self.evaluates_start, steps),
        )


@dataclass(frozen=True)
class TrainerRuntime:
    """A training that is ready to run. It unpacks into `trainer, loader, run`.

    Attributes:
        follow: context that `run` trains in: the consumer's identity, and what producers are told at its end.
        finish: called in that context when the training is done, and not where a signal has stopped it.
        stream: of a training in arrival order.
    """

    trainer: Trainer
    loader: TrainingLoader
    follow: Callable[[], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[], None] = lambda: None
    stream: ArrivalStream | None = None

    def run(self) -> History:
        """Train to the end. A collective. Raises what `Trainer.fit` and `follow` raise."""
        with self.follow():
            history = self.trainer.fit()
            if not self.trainer.controller.stopped_by:
                self.finish()
        return history

    def __iter__(self) -> Iterator[Any]:
        return iter((self.trainer, self.loader, self.run))


def open_plane(deployment_mode: str, run_id: str = "draft", **options: Any) -> ControlPlane:
    """Return this rank's control plane of a training, see `resolve_control_plane`: rank 0 opens it. A collective.

    Raises:
        ConfigError: as `resolve_control_plane`.
        StoreError: on all ranks, as `resolve_control_plane`.
    """
    return run_on_every_rank(
        lambda: (
            resolve_control_plane(deployment_mode, run_id, **options)
            if get_rank() == 0
            else resolve_control_plane(LOCAL_COLOCATED, run_id)
        )
    )


def find_start(parts: TrainerParts, resume: bool, resume_from: Path | None) -> tuple[TrainerParts, int]:
    """Return the parts of a training that starts at a checkpoint with `resume`, and that step, else 0. A collective.

    Args:
        resume_from: the checkpoint; by default that of `parts.persistence`, then the newest of its manager.

    Raises:
        ConfigError: a checkpoint is named without `resume`, or there is no `parts.persistence` to resume with.
        StoreError: the checkpoint cannot be read.
    """
    persistence = parts.persistence
    named = resume_from or (None if persistence is None else persistence.resume_from)
    if not resume:
        if named is not None:
            raise ConfigError(
                f"resume_from {named}: expected resume=True beside it. Only then are acknowledgements after the "
                "checkpoint undone, and the samples that it covers left out; without that they would be trained twice"
            )
        return parts, 0
    if persistence is None:
        raise ConfigError("resume=True: expected persistence, which names the checkpoints, found none")
    folder = named or persistence.manager.latest_dir()
    if folder is None:
        return parts, 0
    step = run_on_every_rank(lambda: read_record(folder).step)
    return replace(parts, persistence=replace(persistence, resume_from=folder)), step


def make_planned_loader(
    refs: Sequence[SampleRef],
    store: FeatureStore,
    strategy: DraftStrategy,
    training: TrainingSpec,
    rank: int = 0,
    world: int = 1,
    left_out: Sequence[int] = (),
) -> FeatureDataLoader:
    """Return the loader of a rank's shuffled micro-batches, padded or packed.

    Raises:
        ConfigError: the global batch does not divide into micro-batches, or is larger than the set.
        DataError: a sample does not fit into a packed row.
    """
    if training.pack_tokens is not None:
        return FeatureDataLoader.for_packed_training(
            refs,
            store,
            PackLimits(training.pack_tokens, training.pack_overlong),
            strategy.pack,
            global_batch_size=training.global_batch_size,
            rank=rank,
            world=world,
            seed=training.seed,
            left_out=left_out,
        )
    return FeatureDataLoader.for_training(
        refs,
        store,
        training.micro_batch_size,
        strategy.collate,
        global_batch_size=training.global_batch_size,
        rank=rank,
        world=world,
        seed=training.seed,
        left_out=left_out,
    )
