"""A year of a made-up fleet in simulated time: what the rules of promotion, of decisions and of the budget make of it.

    python benchmarks/fleet_year.py                                  # three years of 100 targets
    python benchmarks/fleet_year.py --targets 20 --seeds 1 --json OUT.json

The fleet is that of the modules fleet_*.py beside this one, where the true acceptance of every draft is known.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from fleet_figures import Figures, simulate
from fleet_simulation import Settings
from rich.console import Console
from rich.table import Table

FIRST_SEED = 10


def main(
    targets: Annotated[int, typer.Option(min=1)] = 100,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    days: Annotated[int, typer.Option(min=1)] = 365,
    step_hours: Annotated[float, typer.Option(min=0.1)] = 1.0,
    resamples: Annotated[int, typer.Option(min=1)] = 500,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    found: list[Figures] = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(seed, targets, days, step_hours, resamples)
            found.append(simulate(settings, Path(folder)).figures)
        if json_path is not None:
            json_path.write_text(json.dumps([asdict(each) for each in found], indent=1))
    table = Table("", *(f"seed {FIRST_SEED + number}" for number in range(seeds)))
    for name in Figures.__dataclass_fields__:
        table.add_row(name.replace("_", " "), *(format_value(getattr(each, name)) for each in found))
    Console(width=118).print(table)


def format_value(value: float | Mapping[str, int]) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


if __name__ == "__main__":
    typer.run(main)
