"""Which product files one packed EAGLE-3 optimizer step executes: what a reader has to open to follow it.

    python benchmarks/files_per_step.py                  # a table of files
    python benchmarks/files_per_step.py --json OUT.json  # the same as JSON

The toy model trains on one packed batch as the trainer does it: forward, backward, gradient clipping and AdamW on the CPU.
A profile hook counts every Python function of `draftworks/` that is entered, on all threads. A first step without the hook runs
what happens once per process (kernel probes), so that it is not counted.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

PRODUCT = Path(__file__).resolve().parents[1] / "draftworks"
LENGTHS = (24, 17, 24)
"""Tokens of the samples in the packed row; two lengths, so that it has more than one run of equal documents."""


@dataclass(frozen=True)
class FileCount:
    """A product file that the step entered: all of its lines, and how many of its functions were called."""

    path: str
    lines: int
    functions: int


def main(json_file: Annotated[Path | None, typer.Option("--json", help="Write the counts here too.")] = None) -> None:
    """Print the product files that one packed EAGLE-3 step executes."""
    counts = measure()
    print(format_table(counts))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(count) for count in counts], indent=1) + "\n")


def measure() -> list[FileCount]:
    """Count the files of one packed step of the toy, as a training of one rank takes it."""
    import torch

    torch.set_num_threads(1)
    return count_files(make_step(torch.device("cpu")))


def make_step(device: torch.device) -> Callable[[], object]:
    """Return a function that runs one optimizer step of the toy model on the same packed batch."""
    from gpu_steps import CONTEXT
    from train_step import Case, prepare_samples

    from draftworks.config.registry_files import TrainingSpec
    from draftworks.training.backend import SingleTrainingBackend
    from draftworks.training.optimizer import TrainerCore
    from draftworks.training.trainer import make_optimizer, make_plan

    case = Case(max(LENGTHS), len(LENGTHS), ttt=3, hidden=16, intermediate=24, vocab=64, draft_vocab=32)
    strategy, samples = prepare_samples(case)
    cut = [{name: tensor[:length] for name, tensor in sample.items()} for sample, length in zip(samples, LENGTHS)]
    batch = strategy.pack(cut, [str(number) for number in range(len(cut))])
    training = TrainingSpec()
    backend = SingleTrainingBackend(device)
    backend.prepare_model(strategy)
    core = TrainerCore(strategy, backend, make_optimizer(training, make_plan(training, 100), backend))
    return lambda: core.train_step(batch, CONTEXT)


def count_files(step: Callable[[], object]) -> list[FileCount]:
    """Run the step twice, the second time under a profile hook; the files it entered, by path."""
    step()
    entered: dict[Path, set[CodeType]] = defaultdict(set)

    def hook(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PRODUCT):
            entered[path].add(frame.f_code)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [
        FileCount(str(path.relative_to(PRODUCT.parent)), len(path.read_text().splitlines()), len(functions))
        for path, functions in sorted(entered.items())
    ]


def format_table(counts: list[FileCount]) -> str:
    """Return one line per file and a line of totals."""
    lines = [f"{'file':<48} {'lines':>6} {'functions':>10}"]
    lines += [f"{count.path:<48} {count.lines:>6} {count.functions:>10}" for count in counts]
    totals = f"{len(counts)} files"
    return "\n".join([*lines, f"{totals:<48} {sum(c.lines for c in counts):>6} {sum(c.functions for c in counts):>10}"])


if __name__ == "__main__":
    typer.run(main)
