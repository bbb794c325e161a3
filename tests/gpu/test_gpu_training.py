"""A training on a device: resumed it ends as undisturbed, compiled it learns the same, and its AdamW is the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_cases import engine_strategies
from gpu_toys import TrainingFolder, assert_near, gpu_only
from torch import nn

from draftworks.config.registry_files import TrainingSpec
from draftworks.training.backend import ensure_process_group
from draftworks.training.optimizer import BF16Optimizer, LrSchedule
from draftworks.training.trainer import compile_blocks

SPEC = TrainingSpec(global_batch_size=2, micro_batch_size=2, epochs=2, lr=1e-3, compute_dtype="float32", save_every=2)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["eagle3", "domino"])
def test_stopped_and_resumed_ends_as_undisturbed(name: str, device: torch.device, tmp_path: Path) -> None:
    straight = TrainingFolder(tmp_path / "straight", name, device, SPEC).trainer()
    straight.fit()
    halves = TrainingFolder(tmp_path / "halves", name, device, SPEC)
    stopped = halves.trainer(stop_after=3)
    stopped.fit()
    resumed = halves.trainer()
    assert (stopped.controller.global_step, resumed.controller.global_step) == (3, 3)
    resumed.fit()
    assert resumed.controller.global_step == straight.controller.global_step == 6
    assert_near(resumed.weights(), straight.weights(), 1e-4)


@gpu_only
@pytest.mark.parametrize("name", engine_strategies())
def test_compiled_trains_as_plain(name: str, cuda: torch.device, tmp_path: Path) -> None:
    with ensure_process_group(cuda):
        trained = {}
        for compiles in (False, True):
            spec = SPEC.model_copy(update={"compile": compiles, "max_steps": 3})
            trainer = TrainingFolder(tmp_path / str(compiles), name, cuda, spec).trainer()
            trainer.fit()
            trained[compiles] = trainer.weights()
    assert_near(trained[True], trained[False], 1e-3)


@gpu_only
def test_there_is_a_compiler(cuda: torch.device, tmp_path: Path) -> None:
    with ensure_process_group(cuda):
        trainer = TrainingFolder(tmp_path, "dflash", cuda, SPEC).trainer()
        assert compile_blocks(trainer.strategy, cuda)


def test_adamw_and_clipping_are_those_of_the_cpu(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (37, 19), "gain": (19,), "rare": (5, 3)}
    begin = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    gradients = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(3)]
    ends, norms = [], []
    for where in (device, torch.device("cpu")):
        parameters = {name: nn.Parameter(value.to(where, copy=True)) for name, value in begin.items()}
        optimizer = BF16Optimizer(parameters, LrSchedule(0.05, 3, "constant"), weight_decay=0.1, max_grad_norm=0.5)
        for gradient in gradients:
            for name, parameter in parameters.items():
                parameter.grad = gradient[name].to(where, copy=True)
            norms.append(optimizer.step().grad_norm)
        ends.append({name: parameter.detach().cpu() for name, parameter in parameters.items()})
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-5)
    assert_near(*ends, 1e-5)
