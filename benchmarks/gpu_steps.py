"""Timed training steps, as the trainer makes them: whole steps by the clock, their parts by device events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftworks.config.base import Dtype
from draftworks.config.registry_files import TrainingSpec
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.features.contracts import TrainBatch
from draftworks.training.fsdp_backend import FSDPTrainingBackend
from draftworks.training.optimizer import StepResult, TrainerCore
from draftworks.training.trainer import compile_blocks, make_optimizer, make_plan

CONTEXT = StepContext(global_step=1, total_steps=4, training=True)
"""A step at which both losses of Domino have the same weight."""


@dataclass(frozen=True)
class StepTimes:
    """Medians in milliseconds.

    Attributes:
        copy_ms: transfer of the batch to the device, not part of the step.
        peak_bytes: peak memory of the device; None on a CPU.
    """

    copy_ms: float
    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    peak_bytes: int | None


def trainer_core(strategy: DraftStrategy, device: torch.device, dtype: Dtype, compiles: bool = False) -> TrainerCore:
    """Build the core that `Trainer` builds. Needs a process group."""
    training = TrainingSpec(compute_dtype=dtype, lr=1e-5, schedule="constant", warmup_ratio=0.0)
    if compiles:
        compile_blocks(strategy, device)
    backend = FSDPTrainingBackend(device, getattr(torch, dtype))
    backend.prepare_model(strategy)
    return TrainerCore(strategy, backend, make_optimizer(training, make_plan(training, 100), backend))


def end_step(core: TrainerCore, batch: TrainBatch) -> StepResult:
    """Run an optimizer step on a batch that is a whole window."""
    result = core.train_step(batch, CONTEXT)
    assert result is not None, "the batch does not end the step"
    return result


def timed(core: TrainerCore, batch: TrainBatch, steps: int, warm_up: int) -> StepTimes:
    """Time training steps on one batch."""
    device = core.backend.device
    if device.type == "cuda":
        batch = batch.pin_memory()  # as the loader gives it
    there = batch.to(device)
    for _ in range(warm_up):
        core.train_step(there, CONTEXT)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole = [_clocked(lambda: core.train_step(there, CONTEXT), device) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    copies = [_clocked(lambda: batch.to(device), device) for _ in range(steps)]
    parts = [_parts(core, there) for _ in range(steps)]
    forward, backward, optimizer = (statistics.median(laps) for laps in zip(*parts))
    return StepTimes(statistics.median(copies), statistics.median(whole), forward, backward, optimizer, peak)


def _clocked(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds until the work is done on the device."""
    _finish(device)
    begin = time.perf_counter()
    work()
    _finish(device)
    return (time.perf_counter() - begin) * 1e3


def _parts(core: TrainerCore, batch: TrainBatch) -> list[float]:
    """Return forward, backward and optimizer of one step, in milliseconds."""
    watch = _Stopwatch(core.backend.device)
    output = core.strategy.forward_loss(batch, CONTEXT)
    watch.lap()
    core.backend.backward(output.loss_sum)
    watch.lap()
    core.backend.scale_gradients(1.0 / float(output.loss_weight))
    core.optimizer.step()
    watch.lap()
    return watch.laps()


class _Stopwatch:
    """Laps on the device's time line, without waiting for it in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def laps(self) -> list[float]:
        _finish(self._device)
        if self._device.type == "cuda":
            return [begin.elapsed_time(end) for begin, end in zip(self._events, self._events[1:])]
        return [(end - begin) * 1e3 for begin, end in zip(self._marks, self._marks[1:])]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
