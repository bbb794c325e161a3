"""Drafts of the embedded target for the topologies: parts of trainers and producers from the files of a small stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from draft_run_files import OPTIONS
from stream_toys import STREAMS, TRAINING, StreamFiles, make_rows

from draftworks.config.registry_files import TrainingSpec
from draftworks.programs.assembly import Samples, build_draft, build_evaluation_loader, open_samples
from draftworks.programs.program import ProgramContext
from draftworks.stream.arrival_producer import ProducerParts
from draftworks.stream.row_sources import RowSource, TokenSource
from draftworks.stream.trainer_runtime import TrainerParts
from draftworks.training.checkpoint_manager import CheckpointManager
from draftworks.training.trainer import Persistence

ARRIVAL = TRAINING.model_copy(update={"max_steps": 5})
BATCH_TOKENS = 40
ROWS = make_rows("live", 22, seed=4)


def make_trainer_parts(
    files: StreamFiles, training: TrainingSpec = ARRIVAL, checkpoints: Path | None = None, **changes: Any
) -> TrainerParts:
    """Parts with a new draft; with a folder, its checkpoints are there."""
    draft = build_draft(files.target, "eagle3", OPTIONS, files.folder / "vocab.safetensors", seed=3)
    run = files.train_run("parts")
    heldout = open_samples(run.heldout, run.store, draft.strategy, run.target)
    persistence = None
    if checkpoints is not None:
        persistence = Persistence(CheckpointManager(checkpoints, "toy"), {"strategy": "eagle3"})
    parts = TrainerParts(
        strategy=draft.strategy,
        training=training,
        heldout=build_evaluation_loader(heldout, draft.strategy, 2, ProgramContext()),
        device=torch.device("cpu"),
        persistence=persistence,
    )
    return replace(parts, **changes)


def open_train_samples(files: StreamFiles, parts: TrainerParts) -> Samples:
    """The stored training set; its features are captured if they are not."""
    files.capture("train")
    run = files.train_run("parts", streamed=False)
    return open_samples(run.train, run.store, parts.strategy, run.target)


def make_producer_parts(
    files: StreamFiles,
    source: RowSource | None = None,
    engine: Callable[[], Any] | None = None,
    workers: int = 1,
    **capture: Any,
) -> ProducerParts:
    return ProducerParts(
        source=source or TokenSource(ROWS, BATCH_TOKENS),
        capture=replace(files, capture_options=capture).capture_run("live"),
        streams=STREAMS,
        load_engine=engine or files.engine,
        workers=workers,
    )
