"""The tap hf0 is read from the target's weights only if these are transformers' hidden_states[0]."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, RevivedHost, fake_sglang
from transformers import AutoConfig, AutoModelForCausalLM

from draftworks.capture.engine import EnginePlace, load_engine, make_engine_identity
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.engines.sglang_loading import has_plain_embeddings, require_plain_embeddings
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import CaptureError, EngineError
from draftworks.storage.identity import LayerTap

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
SERVED = CaptureSpec(backend="sglang_server", compute_dtype="float32")


@pytest.mark.parametrize(
    ("model_type", "plain"),
    [
        ("llama", True),
        ("qwen3", True),
        ("qwen3_moe", True),
        ("mistral", True),
        ("gpt_oss", True),
        ("gemma", False),
        ("gemma3_text", False),
        ("granite", False),
        ("nanochat", False),
    ],
)
def test_models_that_scale_norm_or_add_to_embeddings_are_told_apart(model_type: str, plain: bool):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, pad_token_id=0, **SIZES)).eval()
    assert has_plain_embeddings(model) is plain


def test_rows_of_the_input_matrix_are_the_embeddings_of_transformers(
    tiny_engine: HFTargetEngine, tiny_target: TargetFiles
):
    require_plain_embeddings(tiny_target)
    row = [5, 2047, 5, 99]
    expected = tiny_engine.capture([row], [LayerTap(0)])[0]["hf0"]
    assert torch.equal(TargetParts.load(tiny_target).embedding[row].float(), expected)


def test_an_engine_without_embeddings_takes_them_from_the_weights(tiny_target: TargetFiles, tmp_path: Path):
    target = tiny_target.model_copy(update={"hidden_size": HIDDEN, "vocab_size": 50})
    embedding = torch.randn(50, HIDDEN, dtype=torch.bfloat16)
    with fake_sglang(tmp_path) as fake:
        engine = SGLangEngine(target, make_engine_identity(SERVED), RevivedHost(fake), embedding=lambda: embedding)
        (streams,) = engine.capture([[7, 3, 7]], [LayerTap(0), LayerTap(2)])
        without = SGLangEngine(target, make_engine_identity(SERVED), RevivedHost(fake))
        with pytest.raises(EngineError, match="without the target's embeddings"):
            without.capture([[7]], [LayerTap(0)])
    assert sorted(streams) == ["hf0", "hf2", "last"]
    assert torch.equal(streams["hf0"], embedding[[7, 3, 7]].float())


def test_a_target_that_scales_its_embeddings_is_refused_before_anything_is_started(
    tiny_target: TargetFiles, tmp_path: Path
):
    AutoConfig.for_model("granite", embedding_multiplier=12.0, **SIZES).save_pretrained(tmp_path)
    target = tiny_target.model_copy(update={"name": "scaled", "model": str(tmp_path)})
    refused = r"target scaled: tap hf0.*GraniteForCausalLM changes them after the look-up.*backend hf"
    with pytest.raises(CaptureError, match=refused):
        load_engine(target, SERVED, torch.device("cpu"), EnginePlace(tmp_path / "engine", (LayerTap(0), LayerTap(1))))
    assert not (tmp_path / "engine").exists()


def test_a_model_that_transformers_does_not_know_is_refused(tiny_target: TargetFiles, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    with pytest.raises(CaptureError, match="up to its first layer failed: ValueError.*of_tomorrow"):
        require_plain_embeddings(tiny_target.model_copy(update={"model": str(tmp_path)}))
