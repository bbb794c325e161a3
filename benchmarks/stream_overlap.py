"""A producer on one core and a trainer on another: the wall time of both together over that of the slower one alone.

    python benchmarks/stream_overlap.py var/runs/RUN/eagle3_draft/run.yaml var/runs/RUN/training_features/run.yaml

The run files are those of a finished stored training. All three are real programs with one rank, started anew in each
turn, so their imports, and the loading of the target, count: the producer alone fills the store of a stream without a
limit, the trainer alone finds everything in it, and both together share an empty one. Each has a core of its own, in
each case the same. All trainings end with the same weights, or the script fails.

What cores of one machine share (caches, memory, the core itself where they are threads of one) slows both, whatever is
streamed: *unrelated* is the trainer alone beside the producer of another stream.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftworks.config.features import StreamingSpec, WatermarkSpec
from draftworks.config.run_files import CaptureRun, ProduceRun, RunFile, StoreSpec, StreamPlace, TrainRun
from draftworks.data.tokenized import TokenizedSet
from draftworks.drafts.draft_io import read_draft_config
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.stream.controller import DataFlowController
from draftworks.stream.stream_rounds import StreamRounds
from draftworks.stream.streaming_plan import StreamingPlan
from draftworks.stream.training_stream import open_controller

PRODUCER_CORE, TRAINER_CORE = 0, 1
POLL_S = 0.05


@dataclass(frozen=True)
class Case:
    """A training and the capture of its features, in a folder of their own."""

    folder: Path
    training: TrainRun
    capture: CaptureRun

    @property
    def place(self) -> StreamPlace:
        return StreamPlace(
            database=self.folder / "control.sqlite",
            store=StoreSpec(kind="shared_dir", root=self.folder / "features"),
            settings=StreamingSpec(watermark=WatermarkSpec(samples=1 << 30)),
        )

    def start_producer(self) -> subprocess.Popen[bytes]:
        manifest = read_feature_set(self.training.train.features)
        run = ProduceRun(
            out=self.folder / "producer",
            target=self.training.target,
            tokens=self.capture.tokens,
            features=self.training.train.features,
            streams=list(manifest.streams),
            capture=self.capture.capture.model_copy(update={"processes": 1}),
            steps=self.training.training.make_stream_steps(len(manifest.refs)),
            stream=self.place,
        )
        return self._start(run, PRODUCER_CORE, "produce")

    def start_trainer(self) -> subprocess.Popen[bytes]:
        changed = {"out": self.folder / "trainer", "stream": self.place, "resume_from": None}
        return self._start(self.training.model_copy(update=changed), TRAINER_CORE, "train")

    def _start(self, run: RunFile, core: int, program: str) -> subprocess.Popen[bytes]:
        folder = self.folder / program
        folder.mkdir()
        run.out.mkdir()
        run.save(folder / "run.yaml")
        command = [sys.executable, "-m", f"draftworks.programs.{program}", str(folder / "run.yaml")]
        with (folder / "out.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, {core}))

    def wait_until_captured(self, producer: subprocess.Popen[bytes]) -> None:
        """Wait until the store has every feature that the training uses, then end the producer: no training will."""
        controller = open_controller(self.place)
        needed = self._make_plan(controller).find_needed(0)
        keys = {key for ref in needed for key in ref.feature_keys.values()}
        store = open_store(self.place.store)
        while store.find_missing(keys):
            if producer.poll() is not None:
                require_success(producer, (self.folder / "produce" / "out.log").read_text())
            time.sleep(POLL_S)
            store.refresh()
        controller.record_left("measured")
        controller.close()
        require_success(producer, "producer")

    def _make_plan(self, controller: DataFlowController) -> StreamingPlan:
        manifest = read_feature_set(self.training.train.features)
        ids = TokenizedSet.open(self.capture.tokens).sample_ids
        steps = self.training.training.make_stream_steps(len(manifest.refs))
        return StreamRounds(manifest.refs, ids, manifest.streams, steps, self.place, controller).open(()).plan

    @property
    def digest(self) -> str:
        return str(read_draft_config(self.folder / "trainer").weights_digest)


def require_success(process: subprocess.Popen[bytes], about: str) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"a program has ended with {process.returncode}: {about}")


def time_producer(case: Case) -> float:
    started = time.monotonic()
    case.wait_until_captured(case.start_producer())
    return time.monotonic() - started


def time_trainer(case: Case) -> float:
    case.wait_until_captured(case.start_producer())
    case.place.database.unlink()  # type: ignore[union-attr]
    started = time.monotonic()
    require_success(case.start_trainer(), "trainer")
    return time.monotonic() - started


def time_both(case: Case) -> float:
    started = time.monotonic()
    producer, trainer = case.start_producer(), case.start_trainer()
    require_success(trainer, "trainer")
    require_success(producer, "producer")
    return time.monotonic() - started


def time_unrelated(case: Case) -> float:
    """Time a trainer whose features are ready, while the producer of another stream has the other core."""
    case.wait_until_captured(case.start_producer())
    case.place.database.unlink()  # type: ignore[union-attr]
    other = replace(case, folder=case.folder / "other")
    other.folder.mkdir()
    started = time.monotonic()
    producer, trainer = other.start_producer(), case.start_trainer()
    require_success(trainer, "trainer")
    taken = time.monotonic() - started
    other.wait_until_captured(producer)
    return taken


MEASURED = {"producer": time_producer, "trainer": time_trainer, "unrelated": time_unrelated, "both": time_both}


def main(
    training: Annotated[Path, typer.Argument(help="The run file of a finished training.")],
    capture: Annotated[Path, typer.Argument(help="The run file that captured its features.")],
    turns: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    epochs: Annotated[float, typer.Option(help="Of the training.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write all figures.")] = None,
) -> None:
    """Time producer and trainer, alone and together."""
    train_run, capture_run = TrainRun.load(training), CaptureRun.load(capture)
    settings = {"epochs": epochs, "eval_every": 0, "save_every": 0, "processes": 1}
    train_run = train_run.model_copy(update={"training": train_run.training.model_copy(update=settings)})
    seconds: dict[str, list[float]] = {name: [] for name in MEASURED}
    digests = set()
    for _ in range(turns):
        for name, measure in MEASURED.items():
            with tempfile.TemporaryDirectory() as folder:
                case = Case(Path(folder), train_run, capture_run)
                seconds[name].append(measure(case))
                if name != "producer":
                    digests.add(case.digest)
    assert len(digests) == 1, "trainings ended with different weights"
    slower = max(statistics.median(seconds["producer"]), statistics.median(seconds["trainer"]))
    table = Table("", "median s", "of the slower alone", "fastest", "slowest")
    for name, found in seconds.items():
        middle = statistics.median(found)
        table.add_row(name, *(f"{value:.2f}" for value in (middle, middle / slower, min(found), max(found))))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(seconds, indent=2))


if __name__ == "__main__":
    typer.run(main)
