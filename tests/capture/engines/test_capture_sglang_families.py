"""Real SGLang with families other than Llama: its streams equal transformers', or the probe rejects them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from capture_toys import capture_run, random_rows
from sglang_toys import CPU, sglang_engine

from draftworks.capture.engines.hf import load_hf_engine
from draftworks.capture.probe.probe import EngineProbe
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import UnsoundEngineError
from draftworks.storage.identity import LayerTap

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(1800)]

ROWS = random_rows(5, seed=3, longest=60)
TAPS = (LayerTap(1), LayerTap(3), LayerTap(4))
TOLERANCE = 2e-5
"""As a share of the largest absolute value of a stream."""
MakeTarget = Callable[[str], TargetFiles]


def test_a_mixture_of_experts_is_captured_as_transformers_has_it(family_target: MakeTarget, tmp_path: Path):
    target = family_target("qwen3_moe")
    rows = [row.input_ids.tolist() for row in ROWS]
    expected = load_hf_engine(target, CaptureSpec(compute_dtype="float32", device="cpu"), CPU).capture(rows, TAPS)
    engine = sglang_engine(target, tmp_path / "sglang", TAPS)
    try:
        for ours, theirs in zip(engine.capture(rows, TAPS), expected, strict=True):
            assert ours.keys() == theirs.keys()
            assert all((ours[name] - theirs[name]).abs().max() < TOLERANCE * theirs[name].abs().max() for name in ours)
    finally:
        engine.close()


def test_streams_of_gemma_3_without_their_residual_are_refused(
    family_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SGLang 0.5.23 returns the output of the last sublayer; `last`, and therefore the head, is right."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # SGLang would compile its norms and activations, for half a minute
    target = family_target("gemma3_text")
    run = capture_run(target, tmp_path).model_copy(update={"taps": [tap.hf_index for tap in TAPS]})
    engine = sglang_engine(target, tmp_path / "sglang", TAPS)
    try:
        with pytest.raises(UnsoundEngineError, match="hf1") as refused:
            EngineProbe(run, ROWS).compare(engine)
        assert "last" not in str(refused.value).split("It has other weights")[0].split("\n", 1)[1]
    finally:
        engine.close()
