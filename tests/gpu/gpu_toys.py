"""Marks and tolerances of this room, and a training on a device, in a folder."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from gpu_cases import SHAPES, made_up_draft, made_up_samples, made_up_target, names_of, select_options
from torch import Tensor

from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.strategy import DraftStrategy
from draftworks.features.contracts import SampleRef
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.local_store import LocalFeatureStore
from draftworks.training.checkpoint_manager import BestRule, CheckpointManager
from draftworks.training.trainer import Persistence, Trainer

SHAPE = SHAPES["tiny"]
LENGTHS = (20, 33, 12, 41, 26, 18)


def gpu_only(test):
    """Skips where there is no GPU."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skipped(test))


def back_ends(strategy: str) -> tuple[str, ...]:
    """Those of its attention."""
    return get_args(type(select_options(strategy, SHAPE)).model_fields["attention"].annotation)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor, by the norm of the difference; tolerance is of the norm of what is expected, and of the largest of all."""
    assert found.keys() == expected.keys()
    norms = {name: float(tensor.float().norm()) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        assert torch.isfinite(found[name]).all(), name
        error = float((found[name].float() - tensor.float()).norm())
        assert error <= tolerance * (norms[name] + 1e-3 * max(norms.values())), (name, error)


@dataclass(frozen=True)
class TrainingFolder:
    """A short training of a small draft whose features and checkpoints are in a folder: every trainer goes on from the newest."""

    root: Path
    strategy: str
    device: torch.device
    spec: TrainingSpec

    def trainer(self, stop_after: int | None = None) -> Trainer:
        """At the end of step `stop_after` a signal asks it to stop."""
        strategy = made_up_draft(self.strategy, SHAPE, made_up_target(SHAPE))
        refs, store = self.stored(strategy)
        manager = CheckpointManager(
            self.root / "checkpoints", "run", max_checkpoints=2, rule=BestRule("eval/avg_loss", True, 0.0)
        )

        def stop_signal() -> int:
            return signal.SIGTERM if trainer.controller.global_step == stop_after else 0

        trainer = Trainer(
            strategy,
            FeatureDataLoader.for_training(refs, store, 2, strategy.collate, global_batch_size=2, prefetch=0),
            FeatureDataLoader.for_evaluation(refs[:2], store, 2, strategy.collate, prefetch=0),
            self.spec,
            self.device,
            persistence=Persistence(manager, {"strategy": self.strategy}, manager.latest_dir()),
            stop_signal=stop_signal,
        )
        return trainer

    def stored(self, strategy: DraftStrategy) -> tuple[list[SampleRef], LocalFeatureStore]:
        """Samples under their own names; those that are stored already are not stored again."""
        store = LocalFeatureStore(self.root / "store")
        samples = made_up_samples(strategy, SHAPE, LENGTHS)
        refs = []
        for name, sample in zip(names_of(samples), samples, strict=True):
            keys = {feature: f"{name}-{feature}" for feature in sample}
            length = len(sample["input_ids"])
            refs.append(store.put(SampleRef(name, "run", name, store.uri, keys, {}, num_tokens=length), sample))
        store.flush()
        return refs, store
