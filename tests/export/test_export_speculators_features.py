"""Features in the layout of speculators: read by that library they are what was captured."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.errors import DataError, StoreError
from draftworks.export.speculators_features import (
    SpeculatorsFeatures,
    export_features,
    quantize,
    undo_final_norm,
)
from draftworks.features.contracts import SampleRef
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.manifest import FeatureSetIdentity, FeatureSetManifest, make_manifest
from draftworks.features.tensor_bytes import decode_features, encode_stream

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, EPS = 64, 1e-6
WEIGHT = torch.linspace(0.5, 2.0, HIDDEN) * torch.where(torch.arange(HIDDEN) % 7 == 0, -1.0, 1.0)
TAPS = ("hf2", "hf4", "hf5")


def apply_norm(states: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    states = states.float()
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + EPS) * weight


@dataclass(frozen=True)
class Captured:
    """A feature set of four samples; `streams` as they are read, by sample and name."""

    folder: Path
    manifest: FeatureSetManifest
    streams: list[dict[str, Tensor]]

    def export(self, out: str = "out", weight: Tensor | None = WEIGHT, **options) -> Path:
        tokens = TokenizedSet.open(self.folder / "tokens")
        wanted = SpeculatorsFeatures(TAPS, weight, **options)
        export_features(self.manifest, LocalFeatureStore(self.folder / "store"), tokens, wanted, self.folder / out)
        return self.folder / out

    def read(self, out: Path, row: int) -> dict[str, Tensor]:
        return load_file(out / "hidden_states" / f"hs_{row}.safetensors")


@pytest.fixture(params=["plain", "fp8"])
def captured(tmp_path: Path, request: pytest.FixtureRequest) -> Captured:
    """`hf5` is a hundred times as large as `last`, as residual streams of deep layers are."""
    generator, rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
    ids = [rng.integers(5, 100, length).astype(np.int32) for length in (9, 1, 17, 5)]
    rows = [TokenRow(f"s{i}", each, np.arange(len(each)) >= len(each) // 2) for i, each in enumerate(ids)]
    write_tokens(tmp_path / "tokens", rows)
    store, refs, streams = LocalFeatureStore(tmp_path / "store"), [], []
    for index, row in enumerate(rows):
        states = {name: torch.randn(len(row), HIDDEN, generator=generator) for name in (*TAPS, "last")}
        states["hf5"] *= 100
        states["last"] = apply_norm(states["last"])
        encode = encode_stream if request.param == "fp8" else torch.Tensor.bfloat16
        stored = {name: encode(each) for name, each in states.items()}
        keys = {name: f"{index:030x}{number:02x}" for number, name in enumerate(states)}
        refs.append(store.put(SampleRef(row.sample_id, "", "", "", keys, {}, num_tokens=len(row)), stored))
        streams.append(decode_features(stored, "here"))
    store.flush()
    manifest = make_manifest(refs, FeatureSetIdentity("target"), (*TAPS, "last"), store.uri)
    return Captured(tmp_path, manifest, streams)


def test_taps_are_bit_for_bit_those_captured_and_the_norm_of_the_last_stream_is_last(captured: Captured):
    out = captured.export()
    for row, streams in enumerate(captured.streams):
        found = captured.read(out, row)
        assert found.keys() == {"hidden_states", "token_ids"}
        assert found["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(found["hidden_states"][:, :3], torch.stack([streams[name] for name in TAPS], dim=1))
        assert torch.allclose(apply_norm(found["hidden_states"][:, 3]), streams["last"].float(), rtol=0.05, atol=0.02)
    record = json.loads((out / "draftworks.json").read_text())
    assert record["target_layer_ids"] == [2, 4, 5]
    assert (record["samples"], record["tokens"], record["transfer"]) == (4, 32, "file")


def test_in_fp8_each_token_has_one_scale_and_a_small_stream_keeps_its_digits(captured: Captured):
    out = captured.export(fp8=True)
    for row, streams in enumerate(captured.streams):
        found = captured.read(out, row)
        states, scales = found["hidden_states"], found["hidden_states_scales"]
        assert (states.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scales.shape == (len(states), 1, 1)
        last = apply_norm(states.float()[:, 3] * scales[:, 0])
        cosine = torch.nn.functional.cosine_similarity(last, streams["last"].float(), dim=1)
        assert float(cosine.min()) > 0.998


def test_last_of_before_the_norm_is_written_as_captured(captured: Captured):
    found = captured.read(captured.export(weight=None), 0)
    assert torch.equal(found["hidden_states"][:, 3], captured.streams[0]["last"])


@given(st.integers(0, 2**31), st.floats(0.1, 1e4))
def test_the_norm_of_what_it_is_undone_to_is_the_same(seed: int, size: float):
    last = apply_norm(torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(seed)) * size)
    assert torch.allclose(apply_norm(undo_final_norm(last, WEIGHT, "here")), last, rtol=2e-4, atol=1e-5)


def test_channels_of_weight_zero_get_what_the_others_lack():
    weight = WEIGHT.clone()
    weight[3:9] = 0
    last = apply_norm(torch.randn(6, HIDDEN), weight)
    states = undo_final_norm(last, weight, "here")
    assert torch.allclose(apply_norm(states, weight), last, rtol=1e-3, atol=1e-4)


def test_another_norm_than_an_rms_norm_with_this_weight_is_refused_and_nothing_is_left(captured: Captured):
    with pytest.raises(DataError, match=r"sample s0: `last` over the weight .* root mean square of .*expected 1"):
        captured.export(weight=WEIGHT * 1.5)
    assert not any(path.name.startswith(("out", ".out")) for path in captured.folder.iterdir())


def test_an_existing_folder_and_a_missing_stream_are_refused(captured: Captured):
    out = captured.export(limit=2)
    assert len(list((out / "hidden_states").iterdir())) == 2
    with pytest.raises(StoreError, match="expected a folder that does not exist yet"):
        captured.export()
    wanted = SpeculatorsFeatures(("hf2", "hf9"), None)
    with pytest.raises(StoreError, match=r"lacks the streams \['hf9'\]"):
        export_features(
            captured.manifest,
            LocalFeatureStore(captured.folder / "store"),
            TokenizedSet.open(captured.folder / "tokens"),
            wanted,
            captured.folder / "other",
        )


def test_a_token_of_zeros_has_the_least_scale():
    assert torch.equal(quantize(torch.zeros(2, 3, 4))["hidden_states_scales"], torch.full((2, 1, 1), 1e-12))


@pytest.mark.speculators
@pytest.mark.parametrize("transfer", ["file", "fp8"])
def test_the_real_library_s_trainer_gets_what_was_captured(captured: Captured, transfer: str, tmp_path: Path):
    python = ROOT / ".venv-speculators" / "bin" / "python"
    if not python.exists():
        pytest.skip("no speculators environment: make speculators-env")
    out, answer = captured.export(fp8=transfer == "fp8"), tmp_path / "answer.safetensors"
    script = Path(__file__).with_name("speculators_features_reader.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    command = [str(python), str(script), str(out), transfer, str(answer)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found, tokens = load_file(answer), TokenizedSet.open(tmp_path / "tokens")
    for row, streams in enumerate(captured.streams):
        expected = torch.cat([streams[name] for name in TAPS], dim=1).float()
        states = found[f"{row}/hidden_states"].float()
        assert found[f"{row}/input_ids"].tolist() == tokens[row].input_ids.tolist()
        assert found[f"{row}/loss_mask"].tolist() == tokens[row].loss_mask.astype(int).tolist()
        last = apply_norm(found[f"{row}/verifier_last_hidden_states"])
        cosine = torch.nn.functional.cosine_similarity(last, streams["last"].float(), dim=1)
        if transfer == "file":
            assert torch.equal(states, expected)
            assert float(cosine.min()) > 0.9999
        else:
            largest = expected.abs().amax(dim=1, keepdim=True)
            assert bool(((states - expected).abs() <= expected.abs() / 14 + largest * 2**-17).all())
            assert float(cosine.min()) > 0.998
