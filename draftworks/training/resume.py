"""Resuming from a checkpoint: everything is verified before training begins, and errors give both values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftworks.distributed.collectives import get_rank, get_world_size, run_on_every_rank
from draftworks.drafts.draft_io import load_weights
from draftworks.errors import StoreError
from draftworks.evaluation.result import EvalResult
from draftworks.storage.files import describe_changes
from draftworks.training.backend import TrainingBackend
from draftworks.training.checkpoint_files import CheckpointRecord, read_record, verify
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.history import History
from draftworks.training.optimizer import BF16Optimizer, OptimizerCounters
from draftworks.training.snapshot import RNG, WEIGHTS, Snapshot, load_moments, restore_rng, rng_state


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training stands after `global_step` optimizer steps.

    Attributes:
        samples, global_batch_size: of this training; how a step is split into micro-batches and ranks does not matter.
            `samples` is None for a stream in arrival order, which has one epoch.
        left_out: number of samples that the set lacks of the population whose order it is trained in. Checkpoints record
            the size of the population: that decides the order.
    """

    samples: int | None
    global_batch_size: int
    global_step: int = 0
    left_out: int = 0

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self.samples is None else self.samples // self.global_batch_size

    @property
    def epoch(self) -> int:
        return 0 if self.steps_per_epoch is None else self.global_step // self.steps_per_epoch

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps done of the current epoch."""
        return self.global_step if self.steps_per_epoch is None else self.global_step % self.steps_per_epoch

    @property
    def epoch_samples(self) -> int:
        """Samples seen of the current epoch, over all ranks."""
        return self.epoch_steps * self.global_batch_size

    def after_step(self) -> TrainingProgress:
        return replace(self, global_step=self.global_step + 1)

    def to_json(self) -> dict[str, int | None]:
        return {
            "global_step": self.global_step,
            "epoch": self.epoch,
            "epoch_samples": self.epoch_samples,
            "samples": None if self.samples is None else self.samples + self.left_out,
            "global_batch_size": self.global_batch_size,
        }

    def from_json(self, stored: Mapping[str, Any], where: Path) -> TrainingProgress:
        """Return this training's progress at the step of a checkpoint.

        Raises:
            StoreError: the checkpoint counts samples in other steps or epochs, so that some would be lost or repeated.
        """
        moved = replace(self, global_step=int(stored["global_step"]))
        for key, ours in moved.to_json().items():
            if stored[key] != ours:
                raise StoreError(
                    f"{where}: position: {key}: the checkpoint has {stored[key]}, this training {ours}: it would repeat or "
                    "skip samples"
                )
        return moved


HISTORY = "history.json"


@dataclass(frozen=True)
class ResumeState:
    """A verified checkpoint.

    Attributes:
        window: sums since the last recorded point of the history.
        seconds: of training so far.
    """

    folder: Path
    record: CheckpointRecord
    position: TrainingProgress
    optimizer: OptimizerCounters
    window: EvalResult
    seconds: float
    history: History

    def load_weights(self, model: nn.Module) -> None:
        """Load the weights into a model that is not wrapped yet.

        Raises:
            StoreError: tensors are missing, unexpected or of another shape.
        """
        load_weights(self.folder / WEIGHTS, model)

    def restore(self, optimizer: BF16Optimizer, device: torch.device) -> None:
        """Restore the optimizer and, on as many ranks as before, the random generators. A collective.

        Raises:
            StoreError: a moment is missing, unexpected or of another shape.
        """
        unknown = sorted(self.optimizer.updates.keys() - set(optimizer.names))
        if unknown:
            raise StoreError(f"{self.folder}: optimizer state of parameters that the draft lacks: {unknown}")
        load_moments(self.folder, optimizer.restore(self.optimizer))
        if self.record.world_size == get_world_size():
            restore_rng(self.folder / RNG / f"rank{get_rank()}.safetensors", device)


def read_resume_state(folder: Path, identity: Mapping[str, Any], position: TrainingProgress) -> ResumeState:
    """Read and verify a checkpoint of this training. A collective: the ranks share the reading.

    Args:
        identity: what decides the result of this training; the checkpoint must have the same.
        position: progress of this training before its first step, with the data's size and the global batch.

    Raises:
        StoreError: on all ranks: not a complete checkpoint, an altered file (named), or another training's checkpoint
            (with what differs and both values).
    """
    return run_on_every_rank(lambda: _read(folder, identity, position))


def _read(folder: Path, identity: Mapping[str, Any], position: TrainingProgress) -> ResumeState:
    record = read_record(folder)
    _require_same(folder, record.state.get("identity", {}), identity)
    verify(folder, record, list(record.files)[get_rank() :: get_world_size()])
    try:
        return ResumeState(
            folder,
            record,
            position.from_json(record.state["position"], folder),
            OptimizerCounters(**record.state["optimizer"]),
            EvalResult.from_json(record.state["window"]),
            record.state["seconds"],
            History.load(folder / HISTORY),
        )
    except (KeyError, TypeError) as error:
        raise StoreError(f"{folder}: its record lacks {error}: not a checkpoint of a training") from error


def _require_same(folder: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    different = describe_changes(expected, found, "{name}: the checkpoint has {found}, this training {expected}")
    if different:
        raise StoreError(
            f"{folder}: the checkpoint of another training: {'; '.join(different)}. Resume with what it was made with, or "
            "start over"
        )


class Checkpointer:
    """Saves what `read_resume_state` reads, at most once per step.

    Args:
        identity: what decides the result of this training; only a training of the same identity can resume.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        backend: TrainingBackend,
        optimizer: BF16Optimizer,
        identity: Mapping[str, Any],
    ) -> None:
        self.manager = manager
        self.saved_step: int | None = None
        self._backend = backend
        self._optimizer = optimizer
        self._identity = dict(identity)

    def save(self, position: TrainingProgress, history: History, window: EvalResult, seconds: float) -> None:
        """Save the state after this step, unless it is saved already. A collective. Raises StoreError on all ranks."""
        if self.saved_step == position.global_step:
            return
        state = {
            "position": position.to_json(),
            "optimizer": asdict(self._optimizer.counters()),
            "window": window.to_json(),
            "seconds": seconds,
            "identity": self._identity,
        }
        weights, moments = self._backend.full_state_dict(), self._optimizer.moments()
        documents = {HISTORY: history.to_json()}
        snapshot = Snapshot(state, weights, moments, rng_state(self._backend.device), documents)
        self.manager.save(snapshot, position.global_step)
        self.saved_step = position.global_step
