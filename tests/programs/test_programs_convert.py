"""A GGUF file becomes the model that it was written from: transformers loads the folder, and its logits are the source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import CONFIGS, GgufFile, interleave_halves, make_model, name_tensors
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftworks.programs import convert as convert_program
from draftworks.programs.convert import convert, main
from draftworks.targets.safetensors_headers import WEIGHTS

IDS = torch.arange(40)[None] * 37 % 2048
ROPE = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}


def dequantise(path: Path, **how: Any) -> Path:
    folder = path.parent / "converted"
    convert(path, folder, lambda line: None, **how)
    return folder


def compute_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(folder: Path) -> Any:
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_folder_is_the_model_that_the_file_was_written_from(tmp_path: Path, architecture: str):
    source = make_model(architecture)
    folder = dequantise(GgufFile(architecture, source).write(tmp_path / "model.gguf"))
    loaded = load(folder)
    assert loaded.config.tie_word_embeddings == source.config.tie_word_embeddings
    assert loaded.config.rms_norm_eps == source.config.rms_norm_eps
    assert torch.equal(compute_logits(loaded), compute_logits(source))


def test_rows_of_a_head_are_stored_in_turns_from_both_halves():
    """By hand, as the helper and the program could be wrong together."""
    assert interleave_halves(np.arange(16)[:, None], heads=2)[:, 0].tolist() == [
        *(0, 4, 1, 5, 2, 6, 3, 7),
        *(8, 12, 9, 13, 10, 14, 11, 15),
    ]


@pytest.mark.parametrize("packing", ["Q8_0", "Q4_1", "BF16"])
def test_weights_are_what_the_blocks_say_in_single_precision(tmp_path: Path, packing: str):
    """Queries too: their rows move, and no block has weights of two rows."""
    source = make_model("llama")
    weights = load_file(dequantise(GgufFile("llama", source, packing).write(tmp_path / "model.gguf")) / WEIGHTS)
    kind = gguf.GGMLQuantizationType[packing]
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.layers.1.self_attn.q_proj", "blk.1.attn_q")):
        expected = gguf.dequantize(gguf.quantize(source.state_dict()[f"{ours}.weight"].numpy(), kind), kind)
        assert torch.equal(weights[f"{ours}.weight"], torch.from_numpy(expected)), theirs
    assert {each.dtype for each in weights.values()} == {torch.float32}


def test_a_rope_scaled_as_llama_3_1s_comes_back_from_its_factors(tmp_path: Path):
    """transformers' own reader of GGUF files leaves them out, and the model has other positions."""
    source = make_model("llama", rope_parameters=ROPE)
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](source.config, torch.device("cpu"))
    file = GgufFile("llama", source, tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    loaded = load(dequantise(file.write(tmp_path / "model.gguf")))
    assert loaded.config.rope_parameters == ROPE
    assert torch.equal(compute_logits(loaded), compute_logits(source))


def test_shards_hold_what_one_file_would(tmp_path: Path):
    path = GgufFile("qwen2").write(tmp_path / "model.gguf")
    convert(path, tmp_path / "one", lambda line: None)
    convert(path, tmp_path / "many", lambda line: None, shard_bytes=200_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one").state_dict(), load(tmp_path / "many").state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_the_same_file_gives_the_same_bytes(tmp_path: Path):
    path = GgufFile("qwen2", packing="Q8_0").write(tmp_path / "model.gguf")
    for name in ("one", "two"):
        convert(path, tmp_path / name, lambda line: None)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert json.loads(one["config.json"])["model_type"] == "qwen2"


def test_what_cannot_be_read_is_one_line_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(convert_program, "raise_on_stop", lambda: None)
    path = GgufFile("llama", tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}).write(tmp_path / "model.gguf")
    with pytest.raises(SystemExit) as ended:
        main([str(path), str(tmp_path / "converted")])
    assert ended.value.code == 2
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        f"error: {path}: 1 tensors that a LlamaForCausalLM of transformers does not have: blk.0.attn_sinks"
    )
    assert not (tmp_path / "converted").exists()


def test_every_tensor_of_a_model_has_a_name_in_the_file():
    """Of the helper: a weight that it left out would not be missed in a round trip."""
    source = make_model("qwen2")
    assert len(name_tensors("qwen2", source)) == len(source.state_dict())
