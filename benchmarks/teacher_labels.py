"""A training step whose teacher's argmaxes are known, beside one that finds them and one that does not keep them.

    python benchmarks/teacher_labels.py                  # sizes of SmolLM2-135M; V of 49,152 and 262,144, V_d of 8,192
    python benchmarks/teacher_labels.py --strategy peagle --turns 9

One thread, fp32, forward and backward of a micro-batch of random features; the three take turns, medians of processor
time. `finds` is a step of the first epoch, `knows` one of every later epoch, `plain` one of a training of one epoch.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from figures import format_table
from train_step import Case, prepare, take_gradients

from draftworks.drafts.target_labels import TargetLabels
from draftworks.strategies.eagle3.strategy import Eagle3Strategy
from draftworks.strategies.peagle.strategy import PEagleStrategy


@dataclass(frozen=True)
class Row:
    """Medians, processor milliseconds a step."""

    strategy: str
    vocab: int
    steps: int
    plain: float
    finds: float
    knows: float

    @property
    def gain(self) -> float:
        return self.plain / self.knows


def main(
    strategy: str = "eagle3",
    vocab: Annotated[list[int], typer.Option(help="Sizes of the target's vocabulary.")] = [49_152, 262_144],  # noqa: B006
    ttt: Annotated[list[int], typer.Option(help="Draft steps; a short unroll has two.")] = [2, 4, 7],  # noqa: B006
    length: int = 256,
    batch: int = 2,
    turns: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here too.")] = None,
) -> None:
    """Measure the three kinds of steps in turns."""
    torch.set_num_threads(1)
    smollm2 = Case(length, batch, strategy, hidden=576, heads=9, kv_heads=3, intermediate=1536, draft_vocab=8192)
    rows = [measure(replace(smollm2, ttt=steps, vocab=each), turns) for each in vocab for steps in ttt]
    columns = ["strategy", "vocabulary", "draft steps", "plain ms", "finds ms", "knows ms", "plain ÷ knows"]
    cells = [
        [
            r.strategy,
            f"{r.vocab:,}",
            f"{r.steps}",
            f"{r.plain:.0f}",
            f"{r.finds:.0f}",
            f"{r.knows:.0f}",
            f"{r.gain:.2f}",
        ]
        for r in rows
    ]
    print(format_table(columns, cells))
    lines = [json.dumps({**vars(row), "gain": row.gain}) for row in rows]
    print("\n".join(lines))
    if json_file is not None:
        json_file.write_text("\n".join(lines) + "\n")


def measure(case: Case, turns: int) -> Row:
    strategy, batch = prepare(case)
    assert isinstance(strategy, Eagle3Strategy | PEagleStrategy)

    def run(keeps: bool) -> float:
        strategy.reads_samples_again = keeps
        begin = time.process_time()
        take_gradients(strategy, batch)
        return 1e3 * (time.process_time() - begin)

    times: dict[str, list[float]] = {"plain": [], "finds": [], "knows": []}
    for turn in range(turns + 1):
        strategy._target_labels = TargetLabels()
        took = {"plain": run(keeps=False), "finds": run(keeps=True), "knows": run(keeps=True)}
        if turn:  # the first warms up
            for name, each in took.items():
                times[name].append(each)
    medians = {name: round(statistics.median(each), 1) for name, each in times.items()}
    return Row(case.strategy, case.vocab, case.ttt, **medians)


if __name__ == "__main__":
    typer.run(main)
