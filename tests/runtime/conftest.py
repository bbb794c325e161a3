"""The embedded target as an engine, and the files of a streamed training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stream_toys import StreamFiles

from draftworks.capture.engine import load_engine
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.config.capture import CaptureSpec
from draftworks.config.run_files import TargetFiles


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: TargetFiles) -> HFTargetEngine:
    torch.set_num_threads(1)
    return load_engine(tiny_target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))


@pytest.fixture
def stream_files(tiny_target: TargetFiles, tiny_engine: HFTargetEngine, tmp_path: Path) -> StreamFiles:
    return StreamFiles(tmp_path, tiny_target, lambda: tiny_engine).make()


def _free(store, keys):  # TEMPORARY
    from draftworks.features.sample_folder import sample_key

    folder = store._store._folder
    for key in keys:
        at = sample_key(key)
        folder.remove_below(at, folder.newest(at) + 1)


from draftworks.features.keyed_shared_dir import KeyedSharedDirStore  # noqa: E402

if not hasattr(KeyedSharedDirStore, "free"):
    KeyedSharedDirStore.free = _free
