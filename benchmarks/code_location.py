"""What loading, checking and ranking a fleet costs: seconds of processor time of whole processes, in turns with `import dagster`.

    python benchmarks/code_location.py                    # 1,000 targets
    python benchmarks/code_location.py --targets 100 --repeats 3

Loaded is a registry of targets with nothing but a model and a data set. Checked is the same, with the embedded model and its
data behind every entry, after a first check, so that nothing is found out that is known by content. The leaderboard is that
of the fleet of `decisions.py`, after a first one. Importing Dagster alone stands beside all: no more can be spared.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import yaml
from decisions import make_fleet
from figures import Aim, format_table, print_aims, summarize

ROOT = Path(__file__).resolve().parents[1]
ALONE, LOADED, CHECKED, RANKED = "import dagster", "the code location", "draftworks check", "draftworks leaderboard"
AIMS = {LOADED: 0.6, CHECKED: 2.0, RANKED: 1.5}
"""At most, in seconds of processor time, for a thousand targets."""
LOAD = """
import sys
from pathlib import Path
from spec_assets.code_location import build_definitions
build_definitions(Path(sys.argv[1])).get_repository_def()
"""
COMMAND = "from draftworks.programs.cli import app; app()"
ENTRY = {
    "model": "models/tiny",
    "dataset": "stdlib",
    "max_length": 128,
    "responses": {"max_new_tokens": 64},
    "strategies": {"eagle3": {"options": {"draft_vocab_size": 1024}}},
}


def main(
    targets: Annotated[int, typer.Option(min=10)] = 1000,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        registry, fleet = Path(folder) / "registry", make_fleet(Path(folder) / "fleet", targets).root
        make_registry(registry, targets)
        works = {
            ALONE: ["import dagster"],
            LOADED: [LOAD, str(registry)],
            CHECKED: [COMMAND, "check", "--registry", str(registry)],
            RANKED: [COMMAND, "leaderboard", "--registry", str(fleet)],
        }
        for arguments in works.values():
            run_python(arguments)  # compiled modules, digests of files and findings are kept from here on
        spent: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(repeats):
            for name, arguments in works.items():
                spent[name].append(run_python(arguments))
    alone = median(spent[ALONE])
    rows = [(name, f"{targets:,}", summarize(each, 2), f"{median(each) / alone:.2f}") for name, each in spent.items()]
    print(format_table(("process", "targets", "CPU seconds", "times importing Dagster"), rows))
    print_aims([Aim(f"CPU seconds of {name}", median(spent[name]), aim, True) for name, aim in AIMS.items()])


def make_registry(root: Path, count: int) -> None:
    """Write a registry of targets that share the embedded model and its data, and are sound."""
    for folder in ("models", "datasets"):
        shutil.copytree(ROOT / "registry" / folder, root / folder)
    (root / "targets").mkdir()
    (root / "deployment.yaml").write_text("var: ../var\n")
    for number in range(count):
        (root / "targets" / f"target-{number:05}.yaml").write_text(yaml.safe_dump(ENTRY))


def run_python(arguments: list[str]) -> float:
    """Run a piece of Python with its arguments in a process of its own; return the seconds of processor time it took."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", *arguments], env=env, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    typer.run(main)
