"""The demo from an empty home, in turns with that of other commits: wall time, processor time, and what the drafts accept.

    python benchmarks/demo.py
    python benchmarks/demo.py --against f5da8b1

Each checkout is copied without its results, so that nothing is a hit, and run by the interpreter of this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from figures import Aim, format_table, print_aims, summarize

from draftworks.evaluation.acceptance_length import SYMBOL, format_interval, format_length

ROOT = Path(__file__).resolve().parents[1]
RUN = "from draftworks.programs.cli import app; app()"
DRAFTS = ("eagle3", "dflash")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Turn:
    """One run of the demo.

    Attributes:
        wall_s, cpu_s: seconds, and seconds of processor time of all its processes.
        walks: acceptance length of each draft's walk (rung 3), with its 95% interval.
    """

    wall_s: float
    cpu_s: float
    walks: tuple[str, ...]


def main(
    against: Annotated[list[str] | None, typer.Option(help="An earlier commit; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    sides = ["this", *(against or [])]
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name in sides:
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "checkout"
                copy_checkout(copy) if name == "this" else copy_commit(name, copy)
                turns[name].append(run_demo(copy))
    rows = [
        (name, summarize([one.wall_s for one in found]), summarize([one.cpu_s for one in found]), *found[-1].walks)
        for name, found in turns.items()
    ]
    print(
        format_table(
            ("checkout", "seconds", "of processor time", *(f"{SYMBOL}, walk of {each}" for each in DRAFTS)), rows
        )
    )
    print_aims(
        [
            Aim(
                f"seconds of the demo over those of {name}",
                turns["this"][-1].wall_s / turns[name][-1].wall_s,
                0.5,
                True,
            )
            for name in sides
            if name != "this"
        ]
    )


def copy_checkout(copy: Path) -> None:
    shutil.copytree(ROOT, copy, ignore=choose_left_out)


def copy_commit(commit: str, copy: Path) -> None:
    """Write the files of a commit of this repository into a new folder, and what an installation of it would declare."""
    copy.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
    declare = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(declare, cwd=copy, check=True, capture_output=True)


def run_demo(copy: Path) -> Turn:
    """Run `everything` for the embedded target in a checkout without results."""
    of_make = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    env = {**os.environ, **of_make, "PYTHONPATH": str(copy), "DAGSTER_HOME": str(copy / ".dagster")}
    for words in (["instance", "info"], ["run", "list", "--limit", "1"]):  # as `make` prepares a new instance
        subprocess.run([sys.executable, "-m", "dagster", *words], env=env, cwd=copy, check=True, capture_output=True)
    command = [sys.executable, "-c", RUN, "run", "everything", "--target", "tiny"]
    spent, begun = _count_processor_time(), time.monotonic()
    subprocess.run(command, env=env, cwd=copy, check=True, stdout=sys.stderr)
    wall_s = time.monotonic() - begun
    return Turn(wall_s, _count_processor_time() - spent, tuple(read_walk(copy / "var", each) for each in DRAFTS))


def choose_left_out(folder: str, names: list[str]) -> set[str]:
    """Return what of a checkout's folder is not copied: results, the history of runs, environments."""
    if Path(folder).name == ".dagster":
        return set(names) - {"dagster.yaml"}
    return {name for name in names if name in ("var", ".git", ".cluster", ".llama-cpp") or name.startswith(".venv")}


def read_walk(var: Path, draft: str) -> str:
    """Return the acceptance length of a draft's walk, such as `2.09 (2.00 to 2.20)`."""
    (report,) = (var / f"{draft}_report" / "tiny").glob("*/heldout/report.json")
    rungs = json.loads(report.read_text())["drafts"]["trained"]["rungs"]
    walk = next(each["acceptance"] for each in rungs if each["rung"] == 3)
    return f"{format_length(walk['micro'], 3)} ({format_interval(walk['low'], walk['high'], 3)})"


def _count_processor_time() -> float:
    """Return seconds of all ended descendants: those that lose their parent become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    typer.run(main)
