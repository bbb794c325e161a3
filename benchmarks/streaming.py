"""The price of streaming: one epoch over features that are ready, stored and streamed in turns.

    python benchmarks/streaming.py var/runs/RUN/eagle3_draft/run.yaml            # the run file of a finished training

The streamed trainings find all features in their store, so no producer runs and nothing is waited for: what is measured
are the plan, the acknowledgement of each step and the freeing. Seconds are those of the training steps, without start
and evaluation. Both end with the same weights, or the script fails.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from draftworks.config.features import StoreKind, StreamingSpec
from draftworks.config.run_files import StoreSpec, StreamPlace, TrainRun
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

STORED = "stored"


def copy_features(run: TrainRun, place: StreamPlace) -> None:
    """Put all features of the training set into the store of a stream."""
    source, target = open_store(run.store), open_store(place.store)
    for ref in read_feature_set(run.train.features).refs:
        tensors, handle = source.get(ref)
        target.put(ref, tensors)
        source.release(handle)
    target.close()
    source.close()


def train_once(run: TrainRun, kind: str, folder: Path) -> dict:
    """Train one epoch and return the report."""
    place = None
    if kind != STORED:
        place = StreamPlace(
            database=folder / "control.sqlite",
            store=StoreSpec.model_validate({"kind": kind, "root": folder / "stream"}),
            settings=StreamingSpec(),
        )
        copy_features(run, place)
    training = run.training.model_copy(update={"epochs": 1.0, "eval_every": 0, "save_every": 0, "processes": 1})
    (folder / "out").mkdir()
    changed = run.model_copy(update={"out": folder / "out", "stream": place, "training": training, "resume_from": None})
    return train(changed, ProgramContext())


def main(
    run_file: Annotated[Path, typer.Argument(help="The run file of a finished training.")],
    turns: Annotated[int, typer.Option(help="Trainings of each kind.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
) -> None:
    """Compare a stored epoch with streamed ones, for each kind of store."""
    run = TrainRun.load(run_file)
    kinds = (STORED, *(kind for kind in get_args(StoreKind) if kind != "s3"))
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    digests = set()
    for _ in range(turns):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                report = train_once(run, kind, Path(folder))
            seconds[kind].append(report["seconds"])
            digests.add(report["weights_digest"])
    assert len(digests) == 1, "stored and streamed trainings ended with different weights"
    stored = statistics.median(seconds[STORED])
    table = Table("features", "median s", "of stored", "fastest", "slowest")
    for kind, found in seconds.items():
        middle = statistics.median(found)
        table.add_row(kind, *(f"{value:.2f}" for value in (middle, middle / stored, min(found), max(found))))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(seconds, indent=2))


if __name__ == "__main__":
    typer.run(main)
