"""What a draft should learn for a server that drafts greedily: EAGLE-3 of one data set at several `teacher_temperature`s.

    python benchmarks/teacher_temperature.py var/runs/RUN/eagle3_draft/run.yaml var/runs/RUN/eagle3_report/run.yaml

Each draft is trained anew from the first run file, with one option changed, and measured as the second says, at the
temperatures of serving: rung 1 by both rules, rung 4 by that of a greedy draft. Figures are accepted draft tokens per pass,
means over the seeds. Rung 1 is over the contexts of the stored answers, rung 4 decodes.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import format_table

from draftworks.config.decoding import AcceptanceRule, Decoding, LoopSpec
from draftworks.config.run_files import EvaluateRun, TrainRun
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

WALK = "eval/rung3_walk_acc_len"
RULES: tuple[AcceptanceRule, AcceptanceRule] = ("rejection", "greedy_draft")


@dataclass(frozen=True)
class Column:
    """One figure of the table: its header and the name of its metric."""

    header: str
    metric: str


def list_columns(served: list[float]) -> list[Column]:
    columns = [Column("walk, greedy", WALK)]
    for temperature in served:
        drawn, greedy = (Decoding(temperature, rule).suffix for rule in RULES)
        columns += [
            Column(f"rung 1 at {temperature:g}, rejection", f"eval/simulated_acc_len_{drawn}"),
            Column(f"rung 1 at {temperature:g}, greedy_draft", f"eval/simulated_acc_len_{greedy}"),
            Column(f"rung 4 at {temperature:g}, greedy_draft", f"eval/rung4_loop_{greedy}_acc_len"),
        ]
    return columns


def measure(
    training: TrainRun, report: EvaluateRun, options: dict[str, Any], served: list[float], prompts: int
) -> dict[str, Any]:
    """Train a draft and return its metrics by both rules."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        train(training.model_copy(update={"out": draft, "options": options}), ProgramContext())
        found: dict[str, Any] = {}
        for rule in RULES:
            loop = LoopSpec(prompts=prompts if rule == "greedy_draft" else 0, temperatures=served, rules=[rule])
            changes = {"out": Path(folder) / rule, "draft": draft, "options": options, "loop_cache": None}
            evaluation = report.evaluation.model_copy(update={"loop": loop})
            run = report.model_copy(update={**changes, "evaluation": evaluation})
            found |= evaluate(run, ProgramContext())["drafts"]["trained"]
        return found


def main(
    training_file: Annotated[Path, typer.Argument(help="Run file of a finished training of EAGLE-3.")],
    report_file: Annotated[Path, typer.Argument(help="Run file of its report.")],
    teacher: Annotated[list[float], typer.Option(help="teacher_temperature of a draft.")] = [0.3, 0.6, 1.0, 1.5],  # noqa: B006
    served: Annotated[list[float], typer.Option(help="Temperature of serving.")] = [0.6, 1.0],  # noqa: B006
    seeds: Annotated[int, typer.Option(help="Trainings of each.")] = 2,
    prompts: Annotated[int, typer.Option(help="Prompts of rung 4.")] = 32,
) -> None:
    """Print a table with a row for each `teacher_temperature`."""
    torch.set_num_threads(1)
    training, report = TrainRun.load(training_file), EvaluateRun.load(report_file)
    columns, rows = list_columns(served), []
    for temperature in teacher:
        options = {**training.options, "teacher_temperature": temperature}
        found = []
        for seed in range(seeds):
            trained = training.training.model_copy(update={"seed": training.training.seed + seed})
            found.append(measure(training.model_copy(update={"training": trained}), report, options, served, prompts))
        means = [statistics.mean(each[column.metric] for each in found) for column in columns]
        rows.append([f"{temperature:g}", *(f"{mean:.3f}" for mean in means)])
    print(format_table(["teacher_temperature", *(column.header for column in columns)], rows))


if __name__ == "__main__":
    typer.run(main)
