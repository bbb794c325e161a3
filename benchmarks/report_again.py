"""Cost of a first and of a repeated report: seconds, and forward passes of the target.

    python benchmarks/report_again.py var/runs/RUN/eagle3_report/run.yaml     # a run file that a report's step has left

Rungs 0 to 3 need no pass of the target. Rung 4 does, and is cached by its identity: a second report does not load the
target, nor does one with other slices.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from draftworks.config.run_files import EvaluateRun
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext


@dataclass
class Cost:
    """Cost of one evaluation of a draft and its baselines."""

    what: str
    seconds: float = 0.0
    target_passes: int = 0


@contextmanager
def measure_cost(cost: Cost) -> Iterator[None]:
    def count(module: torch.nn.Module, *_: Any) -> None:
        cost.target_passes += isinstance(module, PreTrainedModel) and module.can_generate()

    hook, begin = register_module_forward_hook(count), time.perf_counter()
    try:
        yield
    finally:
        cost.seconds = round(time.perf_counter() - begin, 2)
        hook.remove()


def measure_costs(run: EvaluateRun, folder: Path) -> list[Cost]:
    """Measure reports of rungs 0 to 3, of all rungs, of all rungs again, and again without slices."""
    evaluation = run.evaluation
    without = evaluation.model_copy(update={"loop": evaluation.loop.model_copy(update={"prompts": 0})})
    other = evaluation.model_copy(update={"slices": []})
    turns = {"rungs 0-3": without, "rungs 0-4": evaluation, "again": evaluation, "again, other slices": other}
    found = []
    for turn, (what, settings) in enumerate(turns.items()):
        out = folder / str(turn)
        out.mkdir()
        update = {"out": out, "evaluation": settings, "loop_cache": folder / "loop_cache"}
        with measure_cost(cost := Cost(what)):
            evaluate(run.model_copy(update=update), ProgramContext())
        found.append(cost)
    return found


def main(run_file: Path) -> None:
    """Print a small table and one line of JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure_costs(EvaluateRun.load(run_file), Path(folder))
    print(f"{'':>20} {'seconds':>8} {'target passes':>14}")
    for cost in found:
        print(f"{cost.what:>20} {cost.seconds:8.2f} {cost.target_passes:14d}")
    print(json.dumps([asdict(cost) for cost in found]))


if __name__ == "__main__":
    typer.run(main)
