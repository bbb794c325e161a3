"""Triton's losses, in its interpreter: arithmetic only, which races, registers and a card's rounding are not."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftworks.drafts.logit_losses import kernels_work

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sglang
def test_interpreted_kernels_find_torchs_losses_and_gradients():
    """SGLang's environment is the one that has Triton."""
    python = ROOT / ".venv-sglang" / "bin" / "python"
    done = subprocess.run(
        [python, "-W", "ignore", Path(__file__).with_name("interpreted_kernels.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert {"dflash", "domino", "dspark", "xpress", "lilicorr", "dflash2"} <= {row["what"] for row in rows}
    for row in rows:
        rounding = 1e-4 if "loss" in row else 5e-7 if "float32" in row["what"] else 0.008
        assert row["gradient"] <= rounding, row  # also that of two bytes, which is rounded once
        assert row.get("loss", 0) <= 1e-5, row
        assert row.get("values", 0) <= 1e-5, row
        assert row.get("scaled", 0) <= 1e-5, row
        assert row.get("argmax", 0) == 0, row


def test_without_triton_a_gpu_takes_torchs_losses_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "draftworks.drafts.fused_losses", raising=False)
    card = SimpleNamespace(type="cuda")
    with caplog.at_level(logging.WARNING):
        assert not kernels_work.__wrapped__(card, torch.bfloat16)
    assert "fused losses do not work here for torch.bfloat16 (ModuleNotFoundError" in caplog.text
    assert not kernels_work.__wrapped__(torch.device("cpu"), torch.float32)
    assert not kernels_work.__wrapped__(card, torch.float64)
