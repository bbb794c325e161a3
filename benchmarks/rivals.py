"""Training steps of ours and of a rival's, in turns on the same sizes: SpecForge 0.2.0 and speculators 0.9.0.

    make specforge-env speculators-env
    python benchmarks/rivals.py                                   # 1024x1, 512x4 and 1024x4 of what it trains on a CPU
    python benchmarks/rivals.py 512x4 --strategies eagle3

Both sides are processes on one thread in fp32, and one waits while the other works; who is first changes from turn to turn.
A step is forward, backward, clipping and AdamW on random features, without either side's trainer. The order of magnitude of
the work is the same, not every operation: SpecForge's losses have means of their own; speculators packs a batch into one
row, whose attention on a CPU has a dense mask over all of it, and DFlash's anchors are drawn for the row as a whole.
SpecForge trains P-EAGLE with FlexAttention only, which has no backward on a CPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from figures import Aim, format_table, print_aims, summarize
from train_step import Case, prepare, train_step
from turns import Stepper, read_memory, serve_steps

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("eagle3", "dflash", "domino", "dspark")
STEPS = 3
"""Steps of one side in one turn."""
MEMORY_AIMS = {"eagle3": 0.2}
"""Of SpecForge's peak memory, by strategy where it is not `BLOCK_MEMORY_AIM`."""
BLOCK_MEMORY_AIM = 0.5


@dataclass(frozen=True)
class Rival:
    """A library in an environment of its own.

    Attributes:
        script: in tools/.
        environment: folder of the environment, which `make {made_by}` makes.
        strategies: those that are compared.
    """

    name: str
    script: str
    environment: str
    made_by: str
    strategies: tuple[str, ...]


SPECFORGE = Rival("SpecForge", "specforge_step.py", ".venv-specforge", "specforge-env", STRATEGIES)
SPECULATORS = Rival("speculators", "speculators_step.py", ".venv-speculators", "speculators-env", ("eagle3", "dflash"))
RIVALS = {each.name: each for each in (SPECFORGE, SPECULATORS)}


@dataclass(frozen=True)
class Race:
    """Processor time of every step in seconds, and peak memory in MB, of both sides.

    Attributes:
        rival: its name.
        our_mb: above `import torch`, as `their_mb`.
        our_step_mb: above what each side's imports take, as `their_step_mb`.
    """

    case: Case
    rival: str
    ours: Sequence[float]
    theirs: Sequence[float]
    our_mb: float
    their_mb: float
    our_step_mb: float
    their_step_mb: float

    @property
    def turn_ratios(self) -> list[float]:
        """The rival's time of each turn over ours."""
        turns = range(0, len(self.ours), STEPS)
        return [sum(self.theirs[at : at + STEPS]) / sum(self.ours[at : at + STEPS]) for at in turns]

    @property
    def memory_share(self) -> float:
        return self.our_mb / self.their_mb


def main(
    sizes: Annotated[list[str], typer.Argument(help="LENGTHxBATCH each.")] = ["1024x1", "512x4", "1024x4"],  # noqa: B006
    strategies: list[str] = list(STRATEGIES),  # noqa: B006
    rivals: list[str] = list(RIVALS),  # noqa: B006
    turns: Annotated[int, typer.Option(min=1)] = 5,
    environments: Annotated[Path, typer.Option(help="Folder of .venv-specforge and .venv-speculators.")] = ROOT,
    one_case: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table of medians over the turns, and the aims for memory."""
    if one_case is not None:
        serve_ours(Case(**json.loads(one_case)))
        return
    against = [choose_rival(name, environments) for name in rivals]
    races = []
    for rival in against:
        for strategy in [each for each in strategies if each in rival.strategies]:
            for size in sizes:
                length, batch = (int(part) for part in size.split("x"))
                races.append(race(Case(length, batch, strategy=strategy), rival, environments, turns))
    print_races(races)


def choose_rival(name: str, environments: Path) -> Rival:
    """Return the rival of that name; ends the program if there is none, or not its environment."""
    if name not in RIVALS:
        raise SystemExit(f"{name}: expected one of {', '.join(RIVALS)}")
    rival = RIVALS[name]
    if not find_python(rival, environments).exists():
        raise SystemExit(
            f"{find_python(rival, environments)} is not there: run `make {rival.made_by}` first, name the folder of the "
            f"environments by --environments, or the others by --rivals"
        )
    return rival


def find_python(rival: Rival, environments: Path) -> Path:
    return environments / rival.environment / "bin" / "python"


def race(case: Case, rival: Rival, environments: Path, turns: int) -> Race:
    """Run both sides in turns."""
    given = json.dumps(asdict(case))
    commands = {
        "ours": [sys.executable, __file__, "--one-case", given],
        "theirs": [str(find_python(rival, environments)), str(ROOT / "tools" / rival.script), given],
    }
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    environments_of = {"ours": {**alone, **settings, "PYTHONPATH": str(ROOT)}, "theirs": {**alone, **settings}}
    sides = {name: Stepper(command, environments_of[name]) for name, command in commands.items()}
    for turn in range(turns):
        for name in sorted(sides, reverse=bool(turn % 2)):
            sides[name].run(STEPS)
    for side in sides.values():
        side.close()
    ours, theirs = sides["ours"], sides["theirs"]
    return Race(*(case, rival.name, ours.seconds, theirs.seconds), *(ours.mb, theirs.mb, ours.step_mb, theirs.step_mb))


def serve_ours(case: Case) -> None:
    """Serve steps of our side; everything is imported before memory counts."""
    import torch

    after_torch = read_memory("VmRSS")
    import draftworks.drafts.target_parts  # noqa: F401
    from draftworks.config.strategies import resolve_strategy

    resolve_strategy(case.strategy).load_factory()
    torch.set_num_threads(1)

    def make() -> Callable[[], object]:
        strategy, batch = prepare(case)
        optimizer = torch.optim.AdamW(strategy.model.parameters(), lr=1e-4, weight_decay=0.0)
        return lambda: train_step(strategy, batch, optimizer)

    serve_steps(make, after_torch)


def print_races(races: Sequence[Race]) -> None:
    """Print a row for each strategy and size, and the aims."""
    rows, aims = [], []
    for each in races:
        size = f"{each.case.length}x{each.case.batch}"
        tokens = each.case.length * each.case.batch / statistics.median(each.ours)
        rows.append(
            [
                f"{each.case.strategy} {size}",
                each.rival,
                summarize([1e3 * value for value in each.ours]),
                summarize([1e3 * value for value in each.theirs]),
                f"{tokens:,.0f}",
                f"{summarize(each.turn_ratios, 2)}",
                f"{each.our_mb:,.0f}, {each.their_mb:,.0f}, {each.memory_share:.2f}",
                f"{each.our_step_mb:,.0f}, {each.their_step_mb:,.0f}, {each.our_step_mb / each.their_step_mb:.2f}",
            ]
        )
        if each.rival == SPECFORGE.name:
            aim = MEMORY_AIMS.get(each.case.strategy, BLOCK_MEMORY_AIM)
            what = f"{each.case.strategy} {size}, peak memory above `import torch`, of SpecForge's"
            aims.append(Aim(what, each.memory_share, aim, at_most=True))
    memory = ("MB above `import torch`: ours, theirs, share", "MB above all imports")
    columns = ("", "rival", "ours, CPU ms", "theirs, CPU ms", "our tokens/s", "times as fast", *memory)
    print(format_table(columns, rows))
    print_aims(aims)


if __name__ == "__main__":
    typer.run(main)
