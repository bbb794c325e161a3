"""What a checkpoint of a training consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from draftworks.evaluation.result import EvalResult
from draftworks.training.backend import TrainingBackend
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.history import History
from draftworks.training.optimizer import BF16Optimizer
from draftworks.training.position import Position
from draftworks.training.resume import HISTORY
from draftworks.training.snapshot import Snapshot, rng_state


class Checkpointer:
    """Puts together what `resume` takes apart, at most once per step.

    Args:
        identity: what decides the result of this training; a checkpoint can only be resumed by a training of the same.
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

    def save(self, position: Position, history: History, window: EvalResult, seconds: float) -> None:
        """Save the state after this step, unless it is saved. A collective. Raises StoreError on all ranks."""
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
