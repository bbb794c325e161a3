"""The capture program on two ranks: they share the samples, and rank 0 reports for both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from draftworks.data.token_rows import TokenRow
from draftworks.data.tokenized import write_tokens
from draftworks.features.manifest import read_feature_set
from draftworks.runs import CaptureRun, TargetFiles
from draftworks.specs import CaptureSpec


def test_two_ranks_capture_one_set(tmp_path: Path, tiny_target: TargetFiles):
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 99, 6).astype(np.int32) for _ in range(12)]
    write_tokens(tmp_path / "tokens", [TokenRow(f"s{i}", row, np.ones(6, np.bool_)) for i, row in enumerate(ids)])
    (tmp_path / "out").mkdir()
    run = CaptureRun(
        out=tmp_path / "out", target=tiny_target, tokens=tmp_path / "tokens", taps=[2], store=tmp_path / "store",
        capture=CaptureSpec(dtype="float32", compute_dtype="float32", device="cpu"),
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "draftworks.programs.capture", str(run.save(tmp_path / "capture.yaml"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert report["captured_samples"] == report["samples"] == 12
    assert report["data_version"] == read_feature_set(run.out).data_version
    assert len(list((run.store.root / "shards").iterdir())) == 2
