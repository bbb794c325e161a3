"""How often the rule of promotion errs, and how often its intervals have the truth, on made-up drafts.

    python benchmarks/promotion_errors.py
    python benchmarks/promotion_errors.py --trials 200

The drafts are those of tests/toys/promotion_worlds.py, where the true difference is known.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from figures import Aim, format_table, print_aims

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "toys")]

worlds, service = import_module("promotion_worlds"), import_module("draftworks.config.service")

LEAST_PROMPTS: int = service.LEAST_PROMPTS
MARGIN: float = service.ServiceSpec().margin

SIZES = (20, 50, LEAST_PROMPTS, 2 * LEAST_PROMPTS)
SIZES_OF_EQUAL_DRAFTS = (LEAST_PROMPTS, 2 * LEAST_PROMPTS, 3 * LEAST_PROMPTS)
SLICES = 30


def main(trials: Annotated[int, typer.Option(min=1, help="Samples of prompts in each cell.")] = 2000) -> None:
    measured = {
        (world.name, size): worlds.measure_errors(world, size, trials) for world in worlds.WORLDS for size in SIZES
    }
    sizes = [f"{size} prompts" for size in SIZES]
    for title, name in (("interval has the truth", "covered"), ("wrongly promoted", "promoted")):
        rows = [
            (world.name, *(f"{getattr(measured[world.name, size], name):.1%}" for size in SIZES))
            for world in worlds.WORLDS
        ]
        print(format_table((title, *sizes), rows), end="\n\n")
    equal = {size: worlds.measure_errors(worlds.EQUAL, size, trials, MARGIN).promoted for size in SIZES_OF_EQUAL_DRAFTS}
    columns = (f"promoted, margin {MARGIN:g}", *(f"{size} prompts" for size in SIZES_OF_EQUAL_DRAFTS))
    print(format_table(columns, [(worlds.EQUAL.name, *(f"{share:.1%}" for share in equal.values()))]), end="\n\n")
    held = {world.name: worlds.measure_held_back(world, SLICES, 20, trials, 0.0) for world in worlds.EQUALS}
    columns = (f"held back by {SLICES} slices, slice_margin 0", "20 prompts each")
    print(format_table(columns, [(name, f"{share:.1%}") for name, share in held.items()]))
    enough = [found for (_, size), found in measured.items() if size >= LEAST_PROMPTS]
    print_aims(
        [
            Aim(f"intervals from {LEAST_PROMPTS} prompts on that have the truth", min(x.covered for x in enough), 0.93),
            Aim(
                f"wrong promotions from {LEAST_PROMPTS} prompts on", max(x.promoted for x in enough), 0.05, at_most=True
            ),
            Aim(f"equal drafts promoted with {LEAST_PROMPTS} prompts", equal[LEAST_PROMPTS], 0.8),
            Aim(f"equal drafts promoted with {max(equal)} prompts", equal[max(equal)], 0.8),
            Aim("drafts without a loss that slices hold back", max(held.values()), 0.05, at_most=True),
        ]
    )


if __name__ == "__main__":
    typer.run(main)
