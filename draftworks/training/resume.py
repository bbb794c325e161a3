"""Resuming from a checkpoint: everything is verified before training begins, and errors give both values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftworks.distributed.collectives import get_rank, get_world_size, run_on_every_rank
from draftworks.drafts.draft_io import load_weights
from draftworks.errors import StoreError
from draftworks.evaluation.result import EvalResult
from draftworks.storage.changes import describe_changes
from draftworks.training.backend import TrainingBackend
from draftworks.training.checkpoint_files import CheckpointRecord, read_record, verify
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.history import History
from draftworks.training.optimizer import BF16Optimizer, OptimizerCounters
from draftworks.training.progress import TrainingProgress
from draftworks.training.snapshot import RNG, WEIGHTS, Snapshot, load_moments, restore_rng, rng_state

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
