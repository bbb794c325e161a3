"""The hf engine: its streams equal those of transformers in any batch, and bad input gets a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from capture_toys import random_rows
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftworks.capture.engine import find_backend, load_engine, make_engine_identity
from draftworks.capture.engines.hf import HFTargetEngine, find_decoder_layers
from draftworks.config.registry_files import CaptureSpec
from draftworks.errors import CaptureError, ConfigError, StoreError
from draftworks.storage.identity import EngineIdentity, LayerTap

CPU = torch.device("cpu")
FP32 = CaptureSpec(compute_dtype="float32", device="cpu")
ROWS = [row.input_ids.tolist() for row in random_rows(7)]


@pytest.fixture(scope="module")
def qwen3_engine() -> HFTargetEngine:
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return HFTargetEngine(Qwen3ForCausalLM(config).eval(), EngineIdentity("hf-float32"), context=64)


@pytest.fixture(params=["tiny", "qwen3"])
def engine(request, tiny_engine) -> HFTargetEngine:
    return tiny_engine if request.param == "tiny" else request.getfixturevalue("qwen3_engine")


def test_taps_equal_hidden_states_of_transformers_at_every_index(engine):
    row = [token % 300 for token in ROWS[0]]
    with torch.no_grad():
        expected = engine.model(torch.tensor([row]), output_hidden_states=True).hidden_states
    captured = engine.capture([row], [LayerTap(k) for k in range(engine.num_layers)])[0]
    assert list(captured) == [*(f"hf{k}" for k in range(engine.num_layers)), "last"]
    for k in range(engine.num_layers):
        assert torch.equal(captured[f"hf{k}"], expected[k][0])
    assert torch.equal(captured["last"], expected[-1][0])


def test_head_on_last_equals_logits(engine):
    rows = [[token % 300 for token in row] for row in ROWS]
    for streams, logits in zip(engine.capture(rows, []), engine.logits(rows)):
        assert torch.allclose(engine.head_logits(streams["last"]), logits, atol=1e-4)


def test_batched_equals_one_by_one_without_padding(engine):
    rows = [[token % 300 for token in row] for row in ROWS]
    batched = engine.capture(rows, [LayerTap(1)])
    for row, streams in zip(rows, batched):
        alone = engine.capture([row], [LayerTap(1)])[0]
        for name, tensor in streams.items():
            assert tensor.shape == alone[name].shape == (len(row), engine.model.config.hidden_size)
            assert torch.allclose(tensor, alone[name], atol=2e-4, rtol=1e-4)


def test_hooks_are_gone_after_capture_and_after_errors(tiny_engine):
    tiny_engine.capture(ROWS[:1], [LayerTap(3)])
    with pytest.raises(CaptureError):
        tiny_engine.capture([[]], [LayerTap(3)])
    assert all(not layer._forward_pre_hooks for layer in find_decoder_layers(tiny_engine.model))


def test_row_longer_than_the_context_is_refused(tiny_engine):
    with pytest.raises(CaptureError, match=r"sequence 1 has 513 tokens, expected 1 to 512"):
        tiny_engine.capture([[5], [5] * 513], [])


def test_ids_outside_the_vocabulary_are_refused(tiny_engine):
    with pytest.raises(CaptureError, match=r"token ids 5..2048, expected 0..2047"):
        tiny_engine.capture([[5, 2048]], [])


def test_tap_outside_the_target_is_refused(tiny_engine):
    with pytest.raises(CaptureError, match=r"layer taps \[8\] are outside the target: it has taps 0..7"):
        tiny_engine.capture([[5]], [LayerTap(8)])


def test_missing_directory_is_named(tiny_target, tmp_path: Path):
    missing = tiny_target.model_copy(update={"model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match=r"nowhere is missing: expected a directory with config.json"):
        load_engine(missing, FP32, CPU)


def test_truncated_weights_are_named(tiny_target, tiny_folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes()[:9999])
    with pytest.raises(StoreError, match=r"model\.safetensors: not a readable safetensors file: its header describes"):
        load_engine(tiny_target.model_copy(update={"model": str(tmp_path)}), FP32, CPU)


def test_model_that_is_no_causal_lm_is_refused(tiny_target, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="is not a causal language model"):
        load_engine(tiny_target.model_copy(update={"model": str(tmp_path)}), FP32, CPU)


def test_unknown_backend_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown capture backend 'hff': did you mean hf\?"):
        find_backend("hff")


def test_compute_dtype_is_part_of_the_engine_identity(tiny_engine):
    assert make_engine_identity(FP32) == tiny_engine.identity
    assert make_engine_identity(CaptureSpec(compute_dtype="bfloat16")) != tiny_engine.identity


def test_bfloat16_compute_is_loaded_as_such(tiny_target):
    engine = load_engine(tiny_target, CaptureSpec(compute_dtype="bfloat16"), CPU)
    assert engine.capture([[5, 6]], [LayerTap(2)])[0]["hf2"].dtype == torch.bfloat16


def test_loading_reads_the_weights_of_the_directory(tiny_engine, tiny_folder: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, trust_remote_code=False)
    assert torch.equal(model.lm_head.weight, tiny_engine.model.lm_head.weight)
