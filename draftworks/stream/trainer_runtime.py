"""A trainer with what surrounds its training: the same for every topology; and beside producers that are processes of their own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import StreamPlace
from draftworks.distributed.collectives import broadcast_from_rank_0, get_rank, run_on_every_rank
from draftworks.distributed.stop_signals import Interrupted
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError, DataError, StoreError
from draftworks.features.loader import FeatureDataLoader, TrainingLoader
from draftworks.features.open_store import open_store_to_write
from draftworks.storage.identity import DIGEST_LENGTH
from draftworks.stream.arrival_producer import LOOK_S, SOURCE, SourceFact
from draftworks.stream.arrival_stream import ArrivalStream
from draftworks.stream.controller import LOCAL_COLOCATED, ControlPlane, DataFlowController, resolve_control_plane
from draftworks.stream.training_stream import open_controller
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


class ArrivalTraining:
    """A training in arrival order, from a step on: what its loader reads from, how long it is, and what it took.

    Features are kept until a checkpoint covers their step, so that one that goes on trains the same samples in the same
    order.

    Args:
        start_step: that of the checkpoint from which the training goes on, else 0.
        stop_signal: number of the signal that asks this rank to stop, or 0.

    Attributes:
        training: the settings, with the optimizer steps that `streaming.until` means as `max_steps`.

    Raises:
        DataError: the source ended before the first global batch.
        StoreError: the control plane cannot be used, or no producer has read the source within `timeout_s`.
    """

    def __init__(
        self,
        place: StreamPlace,
        training: TrainingSpec,
        strategy: DraftStrategy,
        start_step: int,
        stop_signal: Callable[[], int],
    ) -> None:
        plane = run_on_every_rank(
            lambda: (
                ControlPlane(open_controller(place), True)
                if get_rank() == 0
                else resolve_control_plane(LOCAL_COLOCATED, place.run_id)
            )
        )
        self._controller = plane.controller
        until = place.settings.until
        assert until is not None, "of a training in arrival order"
        steps = until.count_steps(training.global_batch_size)
        if steps is None:
            found = run_on_every_rank(
                lambda: _await_end(self._controller, place, stop_signal) if get_rank() == 0 else 0
            )
            steps = broadcast_from_rank_0(found) // training.global_batch_size
            if not steps:
                raise DataError(
                    f"the source has fewer samples than a global batch of {training.global_batch_size}: lower "
                    "training.global_batch_size, or give more data"
                )
        shortest = steps if training.max_steps is None else min(steps, training.max_steps)
        self.training = training.model_copy(update={"max_steps": shortest})
        self.stream = ArrivalStream(
            *(open_store_to_write(place.store), strategy, self.training, plane, start_step, "checkpoint"),
            *(stop_signal, place.settings.timeout_s),
        )

    def digest_order(self) -> str:
        """Return the digest of what each step took, in order, as the control plane has recorded it; on rank 0."""
        taken = hashlib.sha256()
        for each in self._controller.read_order():
            taken.update(json.dumps([each.step, *each.sample_ids]).encode() + b"\n")
        return taken.hexdigest()[:DIGEST_LENGTH]

    def count_rows(self) -> dict[str, int]:
        """Return what became of the source's rows until now, on rank 0."""
        known = self._controller.read_facts().get(SOURCE)
        return {} if known is None else dict(SourceFact(**json.loads(known)).counts or {})


def _await_end(controller: DataFlowController, place: StreamPlace, stop_signal: Callable[[], int]) -> int:
    """Return the samples of a source that is read to its end before the training begins."""
    until = time.monotonic() + place.settings.timeout_s
    while time.monotonic() < until:
        known = controller.read_facts().get(SOURCE)
        fact = None if known is None else SourceFact(**json.loads(known))
        if fact is not None and fact.is_whole:
            return fact.samples
        if signum := stop_signal():
            raise Interrupted(signum, " before the source was read")
        time.sleep(LOOK_S)
    raise StoreError(
        f"run {place.run_id}: the source was not read to its end in {place.settings.timeout_s:g} s: look at the producers' "
        "log. A source without an end needs streaming.until: steps or samples"
    )
