"""A target's hidden states on a device are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from draftworks.capture.engines.hf import load_hf_engine
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.storage.identity import LayerTap

ROWS = [[5, 9, 200, 31, 7, 64, 8], list(range(100, 150)), [3]]
TAPS = [LayerTap(2), LayerTap(4), LayerTap(5)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_hidden_states_are_those_of_the_cpu(
    tiny_target: TargetFiles, device: torch.device, dtype: str, tolerance: float
) -> None:
    captured, logits = [], []
    for where, numbers in ((device, dtype), (torch.device("cpu"), "float32")):
        engine = load_hf_engine(tiny_target, CaptureSpec(compute_dtype=numbers), where)
        captured.append(engine.capture(ROWS, TAPS))
        logits.append(engine.logits(ROWS))
    for found, expected in zip(*captured, strict=True):
        assert found.keys() == expected.keys() == {"hf2", "hf4", "hf5", "last"}
        for name, states in expected.items():
            assert found[name].dtype == getattr(torch, dtype)
            assert (found[name].float() - states).norm() <= tolerance * states.norm()
    for found, expected in zip(*logits, strict=True):
        assert (found.float() - expected).norm() <= tolerance * expected.norm()
