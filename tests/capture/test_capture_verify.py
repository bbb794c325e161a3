"""Captured streams are checked for shape, dtype and values; `check_head` accepts only a right `last`.
A recheck passes intact features, and detects drifted or damaged ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capture_toys import capture_run, random_rows

from draftworks.capture.capture_plan import StreamPlan
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.session import capture_features
from draftworks.capture.verify import check_head, find_largest_bits, recheck, verify_capture
from draftworks.errors import CaptureError, UnsoundEngineError
from draftworks.features.contracts import CaptureConfig
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set

ASKED = CaptureConfig((2, 4), 8, "float32")


def streams(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"hf2": torch.ones(3, 8), "hf4": torch.ones(3, 8), "last": torch.ones(3, 8), **changes}


def test_what_was_asked_for_is_accepted():
    assert ASKED.names == ("hf2", "hf4", "last")
    verify_capture(ASKED, "a", streams(), 3)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"hf4": torch.ones(3, 8), "hf2": torch.ones(3, 8), "last": torch.ones(3, 8)}, "found hf4, hf2, last"),
        ({"hf2": torch.ones(3, 8), "last": torch.ones(3, 8)}, "expected the streams hf2, hf4, last, found hf2, last"),
        (streams(hf8=torch.ones(3, 8)), "found hf2, hf4, last, hf8"),
        (
            streams(hf4=torch.ones(3, 12)),
            r"stream hf4: expected \(positions, 8\) in float32, found \(3, 12\) in float32",
        ),
        (streams(hf2=torch.ones(3, 8).half()), r"stream hf2: .* in float32, found \(3, 8\) in float16"),
        (streams(last=torch.ones(8)), r"stream last: expected \(positions, 8\)"),
    ],
    ids=["order", "missing", "more", "width", "dtype", "rank"],
)
def test_another_name_order_width_or_dtype_is_the_fault_of_the_engine(found, message):
    with pytest.raises(UnsoundEngineError, match=f"sample a.*{message}"):
        verify_capture(ASKED, "a", found, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_missing_zero_and_non_finite_rows_are_named(bad: float):
    with pytest.raises(CaptureError, match="sample a, stream hf2: expected 3 positions, one for each token, found 2"):
        verify_capture(ASKED, "a", streams(hf2=torch.ones(2, 8)), 3)
    with pytest.raises(CaptureError, match="sample a, stream hf4: all 24 values are zero"):
        verify_capture(ASKED, "a", streams(hf4=torch.zeros(3, 8)), 3)
    last = torch.ones(3, 8)
    last[1, 2] = bad
    with pytest.raises(
        CaptureError, match="sample a, stream last: 1 of 24 values are not finite. It was computed in float32"
    ):
        verify_capture(ASKED, "a", streams(last=last), 3)
    found = {name: tensor.bfloat16() for name, tensor in streams(last=last).items()}
    with pytest.raises(CaptureError, match="Capture with compute_dtype float32 instead of bfloat16"):
        verify_capture(replace(ASKED, dtype="bfloat16"), "a", found, 3)


def test_the_head_on_a_wrong_last_is_refused(tiny_engine):
    row = list(range(5, 25))
    last = tiny_engine.capture([row], [])[0]["last"]
    check_head(tiny_engine, ["a"], [row], [last])
    with pytest.raises(CaptureError, match=r"sample a, stream last: .* expected at most 0.0001"):
        check_head(tiny_engine, ["a"], [row], [last * 1.01])
    with pytest.raises(CaptureError):
        check_head(tiny_engine, ["a"], [row], [last * float("nan")])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_judged_as_torch_judges_them(dtype: torch.dtype):
    """Any bits, among them zeros of either sign, denormals, infinities and all kinds of NaN, alone among zeros and not."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    infinity = int(torch.tensor([float("inf")], dtype=dtype).view(integer))
    sign = torch.iinfo(integer).min
    chosen = [0, sign, 1, sign + 1, infinity - 1, infinity, infinity + 1, infinity + sign, infinity + sign - 1, -1]
    drawn = torch.randint(sign, torch.iinfo(integer).max, (200,), generator=torch.Generator().manual_seed(0))
    for bits in [*chosen, *drawn.tolist()]:
        for size in (1, 40_000):
            tensor = torch.zeros(size, dtype=integer)
            tensor[size // 2] = bits
            values = tensor.view(dtype)
            largest = find_largest_bits(values)
            assert (largest == 0) == (not values.any())
            assert (largest < infinity) == bool(torch.isfinite(values).all())


@pytest.fixture
def captured(tiny_target, tmp_path: Path, watched):
    """Capture ten samples with an engine, and return a function that rechecks them with another one."""
    tokens = random_rows(10)

    def capture(dtype: str = "float32", damage=None):
        watched.damage = damage
        run = capture_run(tiny_target, tmp_path, dtype=dtype)
        capture_features(run, watched, tokens)
        watched.damage = None
        return lambda engine: recheck(engine, LocalFeatureStore(run.store.root), read_feature_set(run.out).refs, tokens)

    return capture


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_features_pass_in_either_dtype(captured, watched, dtype):
    found = captured(dtype)(watched)
    assert found.samples == 4
    assert found.rows_equal_tokens
    assert found.finite
    assert found.features_as_captured
    assert found.head_equals_logits
    assert 0 <= found.feature_difference < 1e-2


def test_an_engine_whose_numbers_drifted_is_seen(captured, tiny_engine):
    drifted = copy.deepcopy(tiny_engine.model)
    with torch.no_grad():
        drifted.model.layers[0].mlp.down_proj.weight.mul_(1.01)
    found = captured()(HFTargetEngine(drifted, tiny_engine.identity, context=512))
    assert not found.features_as_captured
    assert found.finite


def test_a_tap_shifted_by_one_layer_is_seen(captured, watched):
    def swapped(streams):
        return {**streams, "hf2": streams["hf4"]}

    assert not captured(damage=swapped)(watched).features_as_captured


@pytest.mark.parametrize("storage", ["fp8", "fp8_taps"])
def test_features_in_fp8_pass_and_drifted_ones_do_not(tiny_target, tmp_path: Path, watched, storage: str):
    tokens = random_rows(6)
    run = capture_run(tiny_target, tmp_path, dtype="bfloat16", storage=storage)
    capture_features(run, watched, tokens)
    store, refs = LocalFeatureStore(run.store.root), read_feature_set(run.out).refs
    found = recheck(watched, store, refs, tokens)
    assert found.finite
    assert found.features_as_captured
    assert found.head_equals_logits
    assert 1e-2 < found.feature_difference < 0.07
    watched.damage = lambda streams: {**streams, "last": streams["last"] * 1.2}
    assert not recheck(watched, store, refs, tokens).features_as_captured


def test_the_storage_decides_the_keys_of_the_streams_that_it_encodes(tiny_target, tmp_path: Path):
    plans = {
        storage: StreamPlan.of(capture_run(tiny_target, tmp_path, dtype="bfloat16", storage=storage))
        for storage in ("plain", "fp8", "fp8_taps")
    }
    keys = {storage: plan.make_keys("0" * 64) for storage, plan in plans.items()}
    assert keys["plain"]["hf2"] != keys["fp8"]["hf2"] == keys["fp8_taps"]["hf2"]
    assert keys["plain"]["last"] == keys["fp8_taps"]["last"] != keys["fp8"]["last"]
    specs = {storage: plan.make_specs(7) for storage, plan in plans.items()}
    assert (specs["fp8"]["hf2"].shape, specs["fp8"]["hf2"].dtype) == ((7, 132), "float8_e4m3fn")
    assert specs["fp8_taps"]["last"] == specs["plain"]["last"]


def test_fp8_of_features_in_float32_is_refused(tiny_target, tmp_path: Path):
    with pytest.raises(ValueError, match="storage fp8 is read as bfloat16: expected dtype bfloat16, found float32"):
        capture_run(tiny_target, tmp_path, storage="fp8")
