"""Kill a training with SIGKILL again and again, and check that nothing is lost.

    python benchmarks/kill_training.py                        # 50 kills of a two-rank training
    python benchmarks/kill_training.py --kills 5 --seed 3 --json kills.json

A small EAGLE-3 draft of the embedded target, on random features, is trained once undisturbed. Then the same training is
started, killed after a random time (torchrun, one rank, or all of them) and restarted in the same folder, until the
number of kills is reached; a training that ends before that is restarted in another folder. After every kill the newest
checkpoint must read back whole and must not be older than the one before. Every training that ends must have the
undisturbed one's weights, bit by bit.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from random_training import RANKS, write_random_training

from draftworks.config.run_files import TrainRun
from draftworks.drafts.draft_io import read_draft_config
from draftworks.training.checkpoint_files import CheckpointFolder, read_record, verify

VICTIMS = ("torchrun", "one rank", "all")
ORPHANS_S = 10.0
"""Seconds in which ranks must exit after their torchrun, or another rank, died."""


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        phase: of the training, inferred from the files it left.
        step_before, step_after: of the newest checkpoint, at the start and after the kill.
        orphans: ranks that outlived their torchrun, and had to be killed too.
    """

    victim: str
    after_s: float
    phase: str
    step_before: int
    step_after: int
    orphans: int

    def __str__(self) -> str:
        steps = f"checkpoint {self.step_before} -> {self.step_after}"
        return f"killed {self.victim} after {self.after_s} s, in {self.phase}: {steps}"


@dataclass
class Summary:
    """Results of all kills.

    Attributes:
        start_s, undisturbed_s: seconds of the undisturbed training to its first checkpoint, and to its end.
        weights_digest: of the undisturbed training.
        finished: trainings that were killed, and ended with the same weights.
    """

    start_s: float
    undisturbed_s: float
    weights_digest: str
    kills: list[Kill] = field(default_factory=list)
    finished: int = 0


class Lost(RuntimeError):
    """A kill destroyed something."""


class Training:
    """One training in a folder of its own, restarted as often as needed."""

    def __init__(self, run: TrainRun) -> None:
        self.run = run
        self.checkpoints = CheckpointFolder(run.checkpoints, run.run_id)
        self._file = run.save(run.out / "train.yaml")
        self._log = run.out / "output.log"
        self._started = 0.0

    def start(self) -> subprocess.Popen:
        self._started = time.time()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        with self._log.open("w") as log:
            program = [*command, "-m", "draftworks.programs.train", str(self._file)]
            return subprocess.Popen(program, stdout=log, stderr=log)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, after reading every file of it; 0 if there is none."""
        steps = self.checkpoints.steps()
        if not steps:
            return 0
        folder = self.checkpoints.final(steps[-1])
        record = read_record(folder)
        verify(folder, record, record.files)
        return steps[-1]

    def phase(self, newest_step: int) -> str:
        """Return the phase in which the process was killed."""
        output = self.output()
        if "training eagle3" not in output:
            return "start"
        if any(path.stat().st_mtime > self._started for path in self.run.checkpoints.glob("*.partial")):
            return "save"
        due = newest_step > 0 and newest_step % self.run.training.eval_every == 0
        return "evaluation" if due and f"step={newest_step} heldout" not in output else "step"

    def weights_digest(self) -> str:
        return read_draft_config(self.run.out).weights_digest


def main(
    kills: int = 50,
    seed: int = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the training.")] = 120,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here too.")] = None,
) -> None:
    """Kill a two-rank training at random moments; prints a table and one JSON line. Exits with 1 if anything is lost."""
    with tempfile.TemporaryDirectory() as folder:
        summary = kill_repeatedly(Path(folder), kills, random.Random(seed), steps)
    print(table(summary))
    line = json.dumps(asdict(summary))
    print(line)
    if json_file is not None:
        json_file.write_text(line + "\n")


def kill_repeatedly(folder: Path, kills: int, dice: random.Random, steps: int) -> Summary:
    """Kill trainings until the number of kills is reached. Raises Lost."""
    run = write_random_training(folder, steps)
    summary = undisturbed(Training(run.model_copy(update={"out": folder / "undisturbed"})))
    trainings = (Training(run.model_copy(update={"out": folder / f"killed{number}"})) for number in range(kills + 1))
    while len(summary.kills) < kills:
        training = next(trainings)
        for kill in kill_until_over(training, kills - len(summary.kills), dice, summary):
            summary.kills.append(kill)
            typer.echo(f"{len(summary.kills)}: {kill}", err=True)
        finish(training)
        if training.weights_digest() != summary.weights_digest:
            raise Lost(f"expected weights {summary.weights_digest}, found {training.weights_digest()}")
        summary.finished += 1
    return summary


def undisturbed(training: Training) -> Summary:
    """Train without a kill."""
    begin = time.monotonic()
    process = training.start()
    while not training.checkpoints.steps() and process.poll() is None:
        time.sleep(0.02)
    start_s = time.monotonic() - begin
    if process.wait() != 0:
        raise RuntimeError(training.output())
    return Summary(start_s, time.monotonic() - begin, training.weights_digest())


def kill_until_over(training: Training, kills: int, dice: random.Random, summary: Summary) -> Iterator[Kill]:
    """Start and kill a training, at most `kills` times, until it ends by itself."""
    at_work_s = summary.undisturbed_s - summary.start_s
    for _ in range(kills):
        victim, before = dice.choice(VICTIMS), training.newest_step()
        # About half of them while starting; the others soon after, so that the training is not over at once.
        after_s = dice.uniform(0.5 * summary.start_s, summary.start_s + 0.2 * at_work_s)
        orphans = kill_after(training.start(), victim, after_s, dice)
        if orphans is None:
            return
        after = training.newest_step()
        if after < before:
            raise Lost(f"{training.run.out}: the newest checkpoint was of step {before}, and is now of {after}")
        yield Kill(victim, round(after_s, 2), training.phase(after), before, after, orphans)


def kill_after(process: subprocess.Popen, victim: str, seconds: float, dice: random.Random) -> int | None:
    """Kill the victim after some seconds; return the number of orphans once all are gone, None if it ended before."""
    time.sleep(seconds)
    if process.poll() is not None:
        return None
    root = psutil.Process(process.pid)
    ranks = root.children()
    chosen = {"torchrun": [root], "one rank": [dice.choice(ranks)] if ranks else [root], "all": [root, *ranks]}
    for target in chosen[victim]:
        with suppress(psutil.NoSuchProcess):  # ranks die with their torchrun
            target.kill()
    process.wait()
    _, orphans = psutil.wait_procs(ranks, timeout=ORPHANS_S)
    for orphan in orphans:
        orphan.kill()
    psutil.wait_procs(orphans)
    return len(orphans)


def finish(training: Training) -> None:
    if training.start().wait() != 0:
        raise Lost(f"{training.run.out}: cannot go on:\n{training.output()}")


def table(summary: Summary) -> str:
    """Return a table of kills by victim and phase."""
    phases = ("start", "step", "save", "evaluation")
    counts = Counter((kill.victim, kill.phase) for kill in summary.kills)
    lines = [f"{'killed':>10}" + "".join(f"{phase:>12}" for phase in phases)]
    lines += [f"{victim:>10}" + "".join(f"{counts[victim, phase]:>12}" for phase in phases) for victim in VICTIMS]
    orphans = sum(kill.orphans for kill in summary.kills)
    lines.append(
        f"{len(summary.kills)} kills, {orphans} ranks outlived their torchrun, {summary.finished} trainings ended with the undisturbed one's weights; a start takes "
        f"{summary.start_s:.1f} s, the undisturbed training {summary.undisturbed_s:.1f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
