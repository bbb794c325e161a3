"""The capture program on two ranks: they share the samples, and rank 0 reports for both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_toys import OneLayerOff, WatchedEngine
from forked_ranks import ForkedRanks

from draftworks.capture.engine import load_engine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import CaptureRun, TargetFiles
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.errors import UnsoundEngineError
from draftworks.features.manifest import read_feature_set
from draftworks.features.open_store import open_store
from draftworks.programs.capture import capture
from draftworks.programs.program import ProgramContext


def capture_run(tmp_path: Path, target: TargetFiles) -> CaptureRun:
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 99, 6).astype(np.int32) for _ in range(12)]
    write_tokens(tmp_path / "tokens", [TokenRow(f"s{i}", row, np.ones(6, np.bool_)) for i, row in enumerate(ids)])
    (tmp_path / "out").mkdir()
    return CaptureRun(
        out=tmp_path / "out", target=target, tokens=tmp_path / "tokens", taps=[2], store=tmp_path / "store",
        capture=CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu"),
    )  # fmt: skip


def test_an_engine_that_is_not_the_target_stores_nothing(tmp_path: Path, tiny_target: TargetFiles, monkeypatch):
    run = capture_run(tmp_path, tiny_target)
    made: list[OneLayerOff] = []

    def load(*arguments) -> OneLayerOff:
        made.append(OneLayerOff(load_engine(*arguments)))
        return made[-1]

    monkeypatch.setattr("draftworks.programs.capture.load_engine", load)
    with pytest.raises(UnsoundEngineError, match="stream hf2 differs by .*; it is hf3"):
        capture(run, ProgramContext())
    assert open_store(run.store).health()["tensors"] == 0
    assert [engine.shared_after for engine in made] == [None]


def test_an_engine_is_shared_with_other_ranks_once_it_was_compared(tmp_path: Path, tiny_target, monkeypatch):
    run = capture_run(tmp_path, tiny_target)
    watched = WatchedEngine(load_engine(tiny_target, run.capture, torch.device("cpu")))
    monkeypatch.setattr("draftworks.programs.capture.load_engine", lambda *arguments: watched)
    capture(run, ProgramContext())
    assert watched.shared_after is not None
    assert 0 < watched.shared_after < len(watched.rows)


def test_two_ranks_capture_one_set(tmp_path: Path, tiny_target: TargetFiles):
    run = capture_run(tmp_path, tiny_target)
    run_file, log = run.save(tmp_path / "capture.yaml"), tmp_path / "capture.log"
    ranks = ForkedRanks.start("draftworks.programs.capture", [str(run_file)], 2, tmp_path / "ranks", log)
    assert ranks.wait() == [0, 0], log.read_text()
    output = log.read_text()
    report = json.loads(output[output.index("{\n") : output.rindex("}") + 1])
    assert report["captured_samples"] == report["samples"] == 12
    assert report["probe"]["probe_compared"] == "hf2, last"
    assert report["data_version"] == read_feature_set(run.out).data_version
    assert len(list((run.store.root / "shards").iterdir())) == 2
