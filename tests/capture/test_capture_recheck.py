"""A recheck passes intact features, and detects drifted or damaged ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from capture_toys import capture_run, random_rows

from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.plan import StreamPlan
from draftworks.capture.session import capture_features
from draftworks.capture.verify import recheck
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import read_feature_set


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
