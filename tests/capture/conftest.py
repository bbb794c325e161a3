"""Fixture: the embedded target as an engine, loaded once."""

from __future__ import annotations

import pytest
import torch
from capture_toys import WatchedEngine

from draftworks.capture.engine import load_engine
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: TargetFiles) -> HFTargetEngine:
    torch.set_num_threads(1)
    return load_engine(tiny_target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))


@pytest.fixture
def watched(tiny_engine: HFTargetEngine) -> WatchedEngine:
    return WatchedEngine(tiny_engine)
