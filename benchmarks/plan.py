"""How far plans are from what runs take: the embedded target, run once, then with more samples by the figures of that.

    python benchmarks/plan.py                                # 200 conversations, then 400
    python benchmarks/plan.py --conversations 500 --factor 3 --epochs 4

Prints, for each step of each run, seconds taken over seconds planned: of the first run, which is planned by documented
rates, and of the second, which is planned by those of the first and less what the first has made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import yaml

from draftworks.evaluation.report.pages import render_table
from draftworks.planning.plan import StepActual, compare_plan, load_plan
from draftworks.planning.plan_table import format_seconds
from draftworks.planning.subject import PlanSubject
from draftworks.targets.registry import Registry

CHECKOUT = Path(__file__).resolve().parents[1]
TARGET = "tiny"
_LOCATION = """from pathlib import Path
from spec_assets.code_location import build_definitions
defs = build_definitions(Path(__file__).parent / "registry")
"""


def make_site(root: Path, epochs: int, processes: int) -> None:
    """Copy the registry of this checkout, with one draft and a shorter training."""
    shutil.copytree(CHECKOUT / "registry", root / "registry")
    (root / "location.py").write_text(_LOCATION)
    (root / "home").mkdir()
    entry = read_entry(root)
    strategy = entry["strategies"]["eagle3"]
    strategy["training"] |= {"epochs": epochs, "eval_every": 0, "processes": processes}
    write_entry(root, {**entry, "strategies": {"eagle3": strategy}})


def read_entry(root: Path) -> dict:
    return yaml.safe_load((root / "registry" / "targets" / f"{TARGET}.yaml").read_text())


def write_entry(root: Path, entry: dict) -> None:
    (root / "registry" / "targets" / f"{TARGET}.yaml").write_text(yaml.safe_dump(entry))


def run(root: Path, conversations: int) -> tuple[StepActual, ...]:
    """Run `everything` on so many conversations; return what its steps took beside their plan."""
    entry = read_entry(root)
    write_entry(root, {**entry, "data": {**entry["data"], "max_conversations": conversations}})
    command = [sys.executable, "-m", "jobs.run", "everything", "--target", TARGET, "-f", str(root / "location.py")]
    environment = {**os.environ, "DAGSTER_HOME": str(root / "home"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    registry = Registry(root / "registry")
    saved = load_plan(registry.resolve_var_folder(), TARGET)
    assert saved is not None, "a run saves its plan"
    return compare_plan(saved, PlanSubject.of(TARGET, registry))


def describe(actual: tuple[StepActual, ...]) -> list[dict[str, str]]:
    rows = []
    made = [each for each in actual if each.seconds is not None]
    for each in made:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        inside = each.step.seconds.low <= (each.seconds or 0.0) <= each.step.seconds.high
        nbytes = f"{each.nbytes / each.step.nbytes.value:.3f}" if each.nbytes and each.step.nbytes.value else ""
        planned, taken = format_seconds(each.step.seconds), f"{each.seconds:.1f} s"
        names = ("step", "planned", "took", "took / plan", "in bounds", "bytes / plan", "rate")
        values = (each.step.asset, planned, taken, ratio, "yes" if inside else "no", nbytes, each.step.source.kind)
        rows.append(dict(zip(names, values, strict=True)))
    planned = sum(each.step.seconds.value for each in made)
    taken = sum(each.seconds or 0.0 for each in made)
    rows.append({"step": "together", "took / plan": f"{taken / planned:.2f}", "took": f"{taken:.1f} s"})
    return rows


def main(
    conversations: Annotated[int, typer.Option(help="Of the first run.")] = 200,
    factor: Annotated[float, typer.Option(help="How many times as many the second run has.")] = 2.0,
    epochs: Annotated[int, typer.Option(help="Of both trainings.")] = 2,
    processes: Annotated[int, typer.Option(help="Ranks of the trainings.")] = 1,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_site(root, epochs, processes)
        for count in (conversations, round(factor * conversations)):
            actual = run(root, count)
            print(f"\n{count} conversations\n\n{render_table(describe(actual))}", flush=True)


if __name__ == "__main__":
    typer.run(main)
