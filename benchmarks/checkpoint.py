"""What a checkpoint costs: saving, the pause of training when saved in the background, and reading back.

    python benchmarks/checkpoint.py                     # 540 MB: weights and AdamW's moments of 45 M parameters
    python benchmarks/checkpoint.py --megabytes 2000 --repeats 5

Beside it, in turns, the same bytes in the same number of files, written and synced by plain Python; deleting old ones is
left out on both sides. Needs three times the bytes of disk and of memory.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, cast

import torch
import typer
from torch import nn

from draftworks.drafts.draft_io import read_weights
from draftworks.drafts.strategy import DraftStrategy
from draftworks.evaluation.result import EvalResult
from draftworks.training.backend import ensure_process_group
from draftworks.training.checkpoint_files import read_record
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.fsdp_backend import FSDPTrainingBackend
from draftworks.training.history import History
from draftworks.training.optimizer import BF16Optimizer, LrSchedule
from draftworks.training.resume import Checkpointer, TrainingProgress, read_resume_state
from draftworks.training.snapshot import WEIGHTS

BYTES_PER_PARAMETER = 12  # fp32 weights and two moments
WIDTH = 2048
START = TrainingProgress(samples=8_000, global_batch_size=8)


@dataclass(frozen=True)
class Result:
    """Medians in seconds. `ratio`: median of each save over the plain write just before it."""

    megabytes: float
    files: int
    repeats: int
    plain_s: float
    save_s: float
    ratio: float
    pause_async_s: float
    load_s: float


class _Training:
    """A model and an optimizer with moments, and the checkpointer that saves and reads them."""

    def __init__(self, megabytes: int) -> None:
        count = max(1, round(megabytes * 1e6 / BYTES_PER_PARAMETER / WIDTH**2))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
        self.backend = FSDPTrainingBackend(torch.device("cpu"))
        shell = SimpleNamespace(model=model, model_methods=(), fsdp_blocks=list)  # all that the backend reads
        self.backend.prepare_model(cast(DraftStrategy, shell))
        self.optimizer = BF16Optimizer(self.backend.parameters(), LrSchedule(1e-3, 1_000))
        for parameter in self.backend.parameters().values():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def save(self, manager: CheckpointManager, step: int) -> None:
        position = TrainingProgress(START.samples, START.global_batch_size, step)
        checkpointer = Checkpointer(manager, self.backend, self.optimizer, {})
        checkpointer.save(position, History(1_000), EvalResult.empty(), 0.0)

    def load(self, folder: Path) -> None:
        state = read_resume_state(folder, {}, START)
        state.restore(self.optimizer, torch.device("cpu"))
        read_weights(folder / WEIGHTS)


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(folder: Path, sizes: list[int], content: memoryview) -> None:
    """Write files of these sizes one after the other, synced, with the folder synced after them."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        with (folder / str(number)).open("wb") as stream:
            stream.write(content[:size])
            stream.flush()
            os.fsync(stream.fileno())


@dataclass(frozen=True)
class Round:
    """Seconds of one turn."""

    plain: float
    save: float
    pause: float
    load: float


class _Bench:
    """Saves, plain writes and loads in turns, so that other load on the machine affects all of them."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        self.folder = folder
        self.training = _Training(megabytes)
        self.manager = CheckpointManager(folder / "sync", "bench")
        self.in_background = CheckpointManager(folder / "async", "bench", save_async=True)
        self.training.save(self.manager, 1)
        first = self.manager.folder.final(1)
        self.record = read_record(first)
        self.sizes = [(first / name).stat().st_size for name in self.record.files]
        self.content = memoryview(os.urandom(max(self.sizes)))

    def turn(self, step: int) -> Round:
        plain = seconds(lambda: write_plainly(self.folder / f"plain{step}", self.sizes, self.content))
        shutil.rmtree(self.folder / f"plain{step}")
        save = seconds(lambda: self.training.save(self.manager, step))
        load = seconds(lambda: self.training.load(self.manager.folder.final(step)))
        pause = seconds(lambda: self.training.save(self.in_background, step))
        self.in_background.wait()
        self.manager.folder.remove(step)
        self.in_background.folder.remove(step)
        return Round(plain, save, pause, load)


def measure(megabytes: int, repeats: int, folder: Path) -> Result:
    bench = _Bench(megabytes, folder)
    turns = [bench.turn(step) for step in range(2, repeats + 2)]

    def median(value: Callable[[Round], float]) -> float:
        return round(statistics.median(map(value, turns)), 3)

    return Result(
        megabytes=round(bench.record.bytes / 1e6, 1),
        files=len(bench.sizes),
        repeats=repeats,
        plain_s=median(lambda turn: turn.plain),
        save_s=median(lambda turn: turn.save),
        ratio=median(lambda turn: turn.save / turn.plain),
        pause_async_s=median(lambda turn: turn.pause),
        load_s=median(lambda turn: turn.load),
    )


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the checkpoint.")] = 540,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    folder: Annotated[Path | None, typer.Option(help="On the disk to measure; default: the temporary folder.")] = None,
) -> None:
    """Print a small table and one line of JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ensure_process_group(torch.device("cpu")):
        result = measure(megabytes, repeats, Path(scratch))
    print(f"{'MB':>8} {'plain s':>8} {'save s':>8} {'ratio':>6} {'async pause s':>14} {'load s':>7}")
    print(
        f"{result.megabytes:8.1f} {result.plain_s:8.3f} {result.save_s:8.3f} {result.ratio:6.2f} "
        f"{result.pause_async_s:14.3f} {result.load_s:7.3f}"
    )
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    typer.run(main)
