"""The gain of packing: training steps on the same samples, padded and packed in turns.

    python benchmarks/packing.py var/runs/RUN/eagle3_draft/run.yaml                     # the run file of a finished
        training
    python benchmarks/packing.py var/runs/RUN/eagle3_draft/run.yaml --strategy dflash   # the demo's options of DFlash

Tokens, masks and features are those of the run, and so is the global batch. A step is everything between two reads:
forward and backward of every micro-batch or row, clipping, AdamW. Both trainings begin with the same weights and see
the same samples, so their losses must agree; the difference is printed too.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from draftworks.config.run_files import TrainRun
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.features.contracts import TrainBatch
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.schedule import PackedTrainSchedule, PackLimits, TrainSchedule, fill_share, require_lengths
from draftworks.programs.assembly import Samples, build_draft, open_samples
from draftworks.training.backend import ensure_process_group
from draftworks.training.fsdp_backend import FSDPTrainingBackend
from draftworks.training.optimizer import TrainerCore
from draftworks.training.trainer import make_optimizer, make_plan

DFLASH = {
    "block_size": 6,
    "mask_token_id": 3,
    "num_layers": 2,
    "layer_ids": [2, 4, 5],
    "num_anchors": 16,
    "weighting": "dpace",
}
CPU = torch.device("cpu")


@dataclass
class Side:
    """One of the two trainings, with the figures of its steps."""

    strategy: DraftStrategy
    core: TrainerCore
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def step(self, batches: Sequence[TrainBatch], ctx: StepContext) -> None:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for batch in batches[:-1]:
            self.core.train_step(batch, ctx)
        result = self.core.train_step(batches[-1], ctx)
        assert result is not None, "the last batch does not end the step"
        self.wall.append(time.perf_counter() - begin)
        self.cpu.append(time.process_time() - begin_cpu)
        self.losses.append(result.totals.loss_sum / result.totals.loss_weight)
        self.places.append(sum(batch["input_ids"].numel() for batch in batches))


@dataclass(frozen=True)
class Result:
    """Medians over the steps. On a busy machine compare processor time, which leaves out the wait for a core."""

    what: str
    step_ms: float
    cpu_ms: float
    supervised_per_s: float
    speedup: float
    cpu_speedup: float
    fill: float


def main(
    run_file: Annotated[Path, typer.Argument(help="run.yaml of a training.")],
    strategy: Annotated[str | None, typer.Option(help="Another than the run's: dflash.")] = None,
    batch: Annotated[int, typer.Option(help="Samples of a padded micro-batch.")] = 4,
    pack_tokens: int = 2048,
    global_batch: Annotated[int | None, typer.Option(help="Another than the run's.")] = None,
    steps: int = 30,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here too.")] = None,
) -> None:
    """Measure training steps, padded and packed; prints tables, and one JSON line per row."""
    torch.set_num_threads(1)
    run = TrainRun.load(run_file)
    if strategy is not None:
        run = run.model_copy(update={"strategy": strategy, "options": DFLASH, "vocab_mapping": None})
    changes = {"global_batch_size": global_batch or run.training.global_batch_size, "micro_batch_size": batch}
    run = run.model_copy(update={"training": run.training.model_copy(update={**changes, "processes": 1})})
    with ensure_process_group(CPU):
        results, difference = measure(run, pack_tokens, steps)
    print(table(results))
    print(f"largest difference of a step's loss: {difference:.1e} of it; load {os.getloadavg()[0]:.1f}")
    print(measure_fills(run, pack_tokens))
    lines = [json.dumps(asdict(result)) for result in results]
    print("\n".join(lines))
    if json_file is not None:
        json_file.write_text("\n".join(lines) + "\n")


def measure(run: TrainRun, pack_tokens: int, steps: int) -> tuple[list[Result], float]:
    """Return the figures of both sides, and the difference of their losses."""
    sides = {name: side_of(run) for name in ("padded", "packed")}
    samples = open_samples(run.train, run.store, sides["padded"].strategy, run.target)
    training = run.training
    common: dict[str, Any] = {"global_batch_size": training.global_batch_size, "seed": training.seed, "prefetch": 0}
    refs, store, limits = samples.refs, samples.store, PackLimits(pack_tokens)
    collate, pack = sides["padded"].strategy.collate, sides["packed"].strategy.pack
    loaders = {
        "padded": FeatureDataLoader.for_training(refs, store, training.micro_batch_size, collate, **common),
        "packed": FeatureDataLoader.for_packed_training(refs, store, limits, pack, **common),
    }
    streams = {name: read_steps(loader) for name, loader in loaders.items()}
    for number in range(steps + 3):
        order = list(sides) if number % 2 else list(sides)[::-1]
        for name in order:
            sides[name].step(next(streams[name]), StepContext(number, steps + 3, training=True))
    content = content_of_steps(samples, loaders["padded"], steps + 3)
    padded, packed = sides.values()
    apart = max(abs(a - b) / abs(a) for a, b in zip(padded.losses, packed.losses))
    return [result(name, side, padded, content) for name, side in sides.items()], apart


def side_of(run: TrainRun) -> Side:
    strategy = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, run.training.seed).strategy
    backend = FSDPTrainingBackend(CPU)
    backend.prepare_model(strategy)
    return Side(
        strategy, TrainerCore(strategy, backend, make_optimizer(run.training, make_plan(run.training, 100), backend))
    )


def read_steps(loader: FeatureDataLoader) -> Iterator[list[TrainBatch]]:
    """Yield the micro-batches of every step, epoch after epoch, read ahead of the clock."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        window: list[TrainBatch] = []
        for batch in loader:
            window.append(batch)
            if batch.ends_step:
                yield window
                window = []


class Content(NamedTuple):
    """Tokens of a step's samples."""

    tokens: int
    supervised: int


def content_of_steps(samples: Samples, loader: FeatureDataLoader, steps: int) -> list[Content]:
    schedule = loader.schedule
    assert isinstance(schedule, TrainSchedule)
    taken = (step for epoch in itertools.count() for step in schedule.samples_of_steps(epoch))
    found: list[Content] = []
    for indices in itertools.islice(taken, steps):
        masks = [samples.tokens.by_id(samples.refs[index].sample_id).loss_mask for index in indices]
        found.append(Content(sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)))
    return found


def result(name: str, side: Side, reference: Side, content: Sequence[Content]) -> Result:
    wall, cpu = side.wall[3:], side.cpu[3:]
    return Result(
        what=name,
        step_ms=round(statistics.median(wall) * 1e3, 1),
        cpu_ms=round(statistics.median(cpu) * 1e3, 1),
        supervised_per_s=round(statistics.median(step.supervised / t for step, t in zip(content[3:], wall))),
        speedup=round(statistics.median(a / b for a, b in zip(reference.wall[3:], wall)), 2),
        cpu_speedup=round(statistics.median(a / b for a, b in zip(reference.cpu[3:], cpu)), 2),
        fill=round(sum(step.tokens for step in content) / sum(side.places), 4),
    )


def measure_fills(run: TrainRun, pack_tokens: int) -> str:
    """Return how full an epoch's rows are against the longest of their step, on one to eight ranks.

    Also for synthetic lengths with a heavy tail.
    """
    features = build_draft(run.target, run.strategy, run.options, run.vocab_mapping, 0).strategy
    samples = open_samples(run.train, run.store, features, run.target)
    real = require_lengths(samples.refs, PackLimits(pack_tokens, "own_row"))
    heavy = tuple(np.clip(np.random.default_rng(0).lognormal(6, 1, 20_000), 16, 4096).astype(int).tolist())
    lines = [
        f"{'lengths':>12} {'batch':>6} {'limit':>6} {'ranks':>6} {'rows/step':>10} {'fill':>7} {'of limit':>9} {'ms/plan':>8}"
    ]
    cases = [
        ("the run's", real, run.training.global_batch_size, pack_tokens),
        ("the run's", real, 64, 1024),
        ("heavy tail", heavy, 64, 8192),
    ]
    for (name, lengths, batch, limit), ranks in itertools.product(cases, (1, 2, 8)):
        if batch > len(lengths):
            continue
        schedule = PackedTrainSchedule(
            samples=len(lengths), lengths=lengths, pack_tokens=limit, global_batch_size=batch, world=ranks
        )
        begin = time.perf_counter()
        plan = [schedule.pack_step(taken) for taken in schedule.samples_of_steps(0)]
        cost = (time.perf_counter() - begin) / len(plan) * 1e3
        level = statistics.mean(fill_share(rows, lengths) for rows in plan)
        rows = sum(map(len, plan))
        full = sum(lengths[index] for step in plan for row in step for index in row) / (rows * limit)
        lines.append(
            f"{name:>12} {batch:>6} {limit:>6} {ranks:>6} {rows / len(plan):>10.1f} {level:>7.1%} {full:>9.1%} {cost:>8.2f}"
        )
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':>8} {'ms/step':>8} {'cpu ms':>7} {'supervised/s':>13} {'times':>6} {'by cpu':>7} {'fill':>7}"]
    for one in results:
        lines.append(
            f"{one.what:>8} {one.step_ms:>8} {one.cpu_ms:>7} {one.supervised_per_s:>13} {one.speedup:>6} "
            f"{one.cpu_speedup:>7} {one.fill:>7.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
