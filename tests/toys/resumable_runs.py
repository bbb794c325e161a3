"""Trainings that live in a folder, how to interrupt them, and what must be the same after all."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_toys import ToyStrategy, eval_loader, ragged_samples, train_loader

from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.features.contracts import FeatureStore, TrainBatch
from draftworks.training.checkpoint_manager import BestRule, CheckpointManager
from draftworks.training.history import History
from draftworks.training.trainer import Persistence, Trainer

GLOBAL, SAMPLES, STEPS_PER_EPOCH, STEPS = 8, 45, 5, 15
SPEC = TrainingSpec(
    global_batch_size=GLOBAL, epochs=3, lr=0.02, compute_dtype="float32", log_every=4, eval_every=3, warmup_ratio=0.1
)


class RecordingStrategy(ToyStrategy):
    """Remembers which samples it was trained on, by the step they were for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        if ctx.training:
            self.seen += [(ctx.global_step, name) for name in batch.sample_ids]
        return super().forward_loss(batch, ctx)


@dataclass(frozen=True)
class ResumableRun:
    """A training in a folder: every trainer it gives goes on from the newest checkpoint there."""

    folder: Path
    spec: TrainingSpec = SPEC
    micro: int = 4
    strategy: Callable[[], DraftStrategy] = RecordingStrategy
    train: Mapping[str, dict[str, Tensor]] = field(default_factory=lambda: ragged_samples(SAMPLES))
    held_out: Mapping[str, dict[str, Tensor]] = field(default_factory=lambda: ragged_samples(7, seed=2))
    identity: Mapping[str, Any] = field(default_factory=lambda: {"strategy": "toy"})
    pack_tokens: int | None = None

    def trainer(
        self,
        rank: int = 0,
        world: int = 1,
        *,
        stop_after: int | None = None,
        store: FeatureStore | None = None,
        held_out_store: FeatureStore | None = None,
        resume_from: Path | None = None,
    ) -> Trainer:
        """At the end of step `stop_after` a signal asks the last rank, and it alone, to stop."""
        strategy, manager, packed = self.strategy(), self.manager(), {"pack_tokens": self.pack_tokens}
        asked = rank == world - 1

        def stop_signal() -> int:
            return signal.SIGTERM if asked and trainer.controller.global_step == stop_after else 0

        trainer = Trainer(
            strategy,
            train_loader(strategy, self.train, self.micro, self.spec.global_batch_size, rank, world, store, **packed),
            eval_loader(strategy, self.held_out, 2, rank, world, held_out_store, **packed),
            self.spec,
            torch.device("cpu"),
            persistence=Persistence(manager, self.identity, resume_from or manager.latest_dir()),
            stop_signal=stop_signal,
        )
        return trainer

    def finished(self, rank: int = 0, world: int = 1) -> Trainer:
        trainer = self.trainer(rank, world)
        trainer.fit()
        return trainer

    def manager(self) -> CheckpointManager:
        spec = self.spec
        return CheckpointManager(
            self.folder,
            "toy",
            rule=BestRule(spec.best_metric, spec.best_mode == "min", spec.best_min_delta),
            max_checkpoints=spec.keep_checkpoints,
            save_async=spec.save_async,
        )


def changed(spec: TrainingSpec = SPEC, **values: Any) -> TrainingSpec:
    return TrainingSpec(**{**spec.model_dump(), **values})


def without_clocks(history: History) -> History:
    """What must not depend on interruptions."""
    return History(
        history.total_steps,
        train=[replace(point, seconds=0.0, tokens_per_s=0.0) for point in history.train],
        evals=[replace(point, seconds=0.0) for point in history.evals],
    )


def assert_bit_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_same_training(found: Trainer, expected: Trainer) -> None:
    """Bit-equal weights and moments of this rank, equal counters, equal history but for the clocks."""
    assert found.controller.global_step == expected.controller.global_step
    assert_bit_equal(found.weights(), expected.weights())
    optimizers = found.core.optimizer, expected.core.optimizer
    mine, theirs = (
        {n: m.to_local() if isinstance(m, DTensor) else m for n, m in optimizer.moments().items()}
        for optimizer in optimizers
    )
    assert_bit_equal(mine, theirs)
    assert optimizers[0].counters() == optimizers[1].counters()
    assert without_clocks(found.controller.history) == without_clocks(expected.controller.history)
