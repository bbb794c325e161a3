"""Training steps by one rank and by two on gloo with FSDP2, in turns: the same global batch, by the clock.

    python benchmarks/two_ranks.py                                # EAGLE-3 at 1024x4: two samples for each of two ranks
    python benchmarks/two_ranks.py 512x4 --strategy dflash

Wants two cores with nothing else to do: who waits for a core makes the other rank wait too.

Both sides are what the launcher starts, a process, or torchrun with two, and take steps as the trainer does: forward,
backward, the ranks' sums, clipping and AdamW, one thread a rank, fp32. One side waits while the other works. Loading of
batches is left out; stop signals too, of which there is one small collective a step.
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
from train_step import Case, prepare_samples
from turns import Stepper, read_memory, serve_steps

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
AIM = 1.8
"""Of one rank's rate."""


@dataclass(frozen=True)
class Race:
    """Seconds of every step by the clock, of one rank and of two.

    Attributes:
        steps: of one side in one turn.
        one_cpu: of processor time, as `two_cpu`, which is rank 0's.
    """

    case: Case
    steps: int
    one: Sequence[float]
    two: Sequence[float]
    one_cpu: Sequence[float]
    two_cpu: Sequence[float]

    @property
    def turn_ratios(self) -> list[float]:
        """The time of one rank over that of two, of each turn."""
        turns = range(0, len(self.one), self.steps)
        return [sum(self.one[at : at + self.steps]) / sum(self.two[at : at + self.steps]) for at in turns]


def main(
    size: Annotated[str, typer.Argument(help="LENGTHxBATCH, of an even batch.")] = "1024x4",
    strategy: str = "eagle3",
    turns: Annotated[int, typer.Option(min=1)] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Of one side in one turn.")] = 3,
    one_case: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table of medians over the turns, and the aim."""
    if one_case is not None:
        serve(Case(**json.loads(one_case)))
        return
    length, batch = (int(part) for part in size.split("x"))
    if batch % RANKS:
        raise typer.BadParameter(f"{RANKS} ranks cannot share {batch} samples evenly")
    print_race(race(Case(length, batch, strategy=strategy), turns, steps))


def race(case: Case, turns: int, steps: int) -> Race:
    """Run both sides in turns."""
    work = [__file__, "--one-case", json.dumps(asdict(case))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    sides = {
        "one": Stepper([sys.executable, *work], environment),
        "two": Stepper([sys.executable, *torchrun, *work], environment),
    }
    for turn in range(turns):
        for name in sorted(sides, reverse=bool(turn % 2)):
            sides[name].run(steps)
    for side in sides.values():
        side.close()
    one, two = sides["one"], sides["two"]
    return Race(case, steps, one.wall_seconds, two.wall_seconds, one.seconds, two.seconds)


def serve(case: Case) -> None:
    """Serve steps; rank 0 is asked for them, and asks the others."""
    import torch

    from draftworks.distributed.collectives import get_rank, max_over_ranks, open_process_group
    from draftworks.training.backend import ensure_process_group

    torch.set_num_threads(1)

    def make() -> Callable[[], object]:
        step = make_step(case)

        def step_together() -> None:
            max_over_ranks(1)
            step()

        return step_together

    with open_process_group("cpu") as device, ensure_process_group(device):
        if get_rank() == 0:
            serve_steps(make, read_memory("VmRSS"))
            max_over_ranks(0)
        else:
            step = make_step(case)
            while max_over_ranks(0):
                step()


def make_step(case: Case) -> Callable[[], float]:
    """Return a training step on this rank's share of the case's samples, which returns the loss over all ranks."""
    import torch
    from gpu_steps import end_step, trainer_core

    from draftworks.distributed.collectives import get_rank, get_world_size

    strategy, samples = prepare_samples(case)
    own = samples[get_rank() :: get_world_size()]
    batch = strategy.collate(own, [str(number) for number in range(len(own))])
    core = trainer_core(strategy, torch.device("cpu"), "float32")

    def step() -> float:
        totals = end_step(core, batch).totals
        return totals.loss_sum / totals.loss_weight

    return step


def print_race(found: Race) -> None:
    """Print a row for each side, and the aim."""
    tokens = found.case.length * found.case.batch
    rows = [
        [name, _milliseconds(seconds), f"{tokens / statistics.median(seconds):,.0f}", _milliseconds(cpu), ratio]
        for name, seconds, cpu, ratio in (
            ("one rank", found.one, found.one_cpu, ""),
            ("two ranks", found.two, found.two_cpu, summarize(found.turn_ratios, 2)),
        )
    ]
    what = f"{found.case.strategy} {found.case.length}x{found.case.batch}"
    print(format_table([what, "ms by the clock", "tokens/s", "CPU ms of rank 0", "times as fast"], rows))
    print_aims([Aim(f"{what}, rate of two ranks / one", statistics.median(found.turn_ratios), AIM)])


def _milliseconds(seconds: Sequence[float]) -> str:
    return summarize([1e3 * each for each in seconds])


if __name__ == "__main__":
    typer.run(main)
