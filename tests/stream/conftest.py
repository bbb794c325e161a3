"""The embedded target as an engine, and the files of a streamed training."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_run_files import OPTIONS
from stream_toys import TRAINING, SerialEngine, StreamFiles

from draftworks.capture.engine import load_engine
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.config.capture import CaptureSpec
from draftworks.config.registry_files import TrainingSpec
from draftworks.config.run_files import TargetFiles
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: TargetFiles) -> HFTargetEngine:
    torch.set_num_threads(1)
    return load_engine(tiny_target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))


@pytest.fixture(scope="session")
def train_stored(
    tiny_target: TargetFiles, tiny_engine: HFTargetEngine, tmp_path_factory
) -> Callable[..., dict[str, Any]]:
    """Returns the report of the stored training of the same data; each is trained once."""

    @functools.cache
    def train_once(training: str, strategy: str, options: str) -> dict[str, Any]:
        files = StreamFiles(tmp_path_factory.mktemp("stored"), tiny_target, lambda: tiny_engine).make()
        files.capture("train")
        spec = TrainingSpec.model_validate_json(training)
        draft = {"strategy": strategy, "options": json.loads(options)}
        return train(files.train_run("stored", streamed=False, training=spec, **draft), ProgramContext())

    def train_stored(
        training: TrainingSpec = TRAINING, strategy: str = "eagle3", options: Mapping[str, Any] = OPTIONS
    ) -> dict[str, Any]:
        return train_once(training.model_dump_json(), strategy, json.dumps(options))

    return train_stored


@pytest.fixture
def stream_files(tiny_target: TargetFiles, tiny_engine: HFTargetEngine, tmp_path: Path) -> StreamFiles:
    engine = SerialEngine(tiny_engine)
    return StreamFiles(tmp_path, tiny_target, lambda: engine).make()
