"""Gradients of a window are reduced over the ranks once, at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from training_toys import ToyStrategy, ragged_samples, train_loader

from draftworks.drafts.strategy import StepContext
from draftworks.training.fsdp_backend import FSDPTrainingBackend
from draftworks.training.optimizer import BF16Optimizer, LrSchedule, TrainerCore

CPU = torch.device("cpu")
STEPS, GLOBAL = 3, 8


class WatchedBackend(FSDPTrainingBackend):
    """Notes after every micro-step whether there is a reduced gradient: a window begins with none."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.reduced: list[bool] = []

    def backward(self, loss: Tensor, *, is_boundary: bool = True) -> None:
        super().backward(loss, is_boundary=is_boundary)
        self.reduced.append(any(parameter.grad is not None for parameter in self.parameters().values()))


class EagerBackend(WatchedBackend):
    """Reduces after every micro-step."""

    def backward(self, loss: Tensor, *, is_boundary: bool = True) -> None:
        super().backward(loss, is_boundary=True)


@contextmanager
def fsdp_watched() -> Iterator[list[bool]]:
    """Whether FSDP is told to reduce, call by call."""
    told: list[bool] = []
    tell = FSDPModule.set_requires_gradient_sync

    def watched(module: FSDPModule, flag: bool, **more: bool) -> None:
        told.append(flag)
        tell(module, flag, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPModule, "set_requires_gradient_sync", watched)
        yield told


def trained(backend: WatchedBackend, micro: int, rank: int, world: int) -> dict[str, Tensor]:
    """Weights after one epoch of `STEPS` steps."""
    strategy = ToyStrategy()
    backend.prepare_model(strategy)
    loader = train_loader(strategy, ragged_samples(STEPS * GLOBAL), micro, GLOBAL, rank, world)
    optimizer = BF16Optimizer(backend.parameters(), LrSchedule(0.01, STEPS))
    core = TrainerCore(strategy, backend, optimizer)
    assert sum(core.train_step(batch, StepContext(training=True)) is not None for batch in loader) == STEPS
    return backend.full_state_dict()


def _deferring_and_eager(rank: int) -> None:
    for micro in (1, 2, 4):
        accumulation = GLOBAL // (2 * micro)
        deferring, eager = WatchedBackend(), EagerBackend()
        with fsdp_watched() as told:
            weights = trained(deferring, micro, rank, world=2)
        assert told == deferring.reduced == ([False] * (accumulation - 1) + [True]) * STEPS
        for name, expected in trained(eager, micro, rank, world=2).items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)
        assert all(eager.reduced)


def test_reduction_is_deferred_on_all_but_the_last_micro_step_and_changes_no_weight(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _deferring_and_eager)
