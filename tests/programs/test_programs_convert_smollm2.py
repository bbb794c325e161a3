"""The real model of the second demo, which `registry/examples/smollm2/fetch.py` fetches: weights as llama.cpp's library
reads them, ids as the published tokenizer cuts text, and an answer that is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import interleave_halves
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftworks.programs.convert import convert

EXAMPLE = Path(__file__).resolve().parents[2] / "registry" / "examples" / "smollm2"
FILE = EXAMPLE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    subprocess.run([sys.executable, str(EXAMPLE / "fetch.py")], check=True)  # what it has fetched it only verifies
    found = tmp_path_factory.mktemp("smollm2") / "model"
    convert(FILE, found, print)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def test_weights_are_those_that_the_library_reads(model: Any):
    stored = {each.name: gguf.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(FILE).tensors}
    weights = {name: each.numpy() for name, each in model.state_dict().items()}
    assert (weights["model.embed_tokens.weight"] == stored["token_embd.weight"]).all()
    assert (weights["model.norm.weight"] == stored["output_norm.weight"]).all()
    for layer in range(30):
        for ours, theirs, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3), ("v_proj", "attn_v", 0)):
            found = weights[f"model.layers.{layer}.self_attn.{ours}.weight"]
            expected = stored[f"blk.{layer}.{theirs}.weight"]
            assert ((interleave_halves(found, heads) if heads else found) == expected).all()


def test_ids_are_those_of_the_published_tokenizer(folder: Path):
    ours, metadata = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), gguf.GGUFReader(FILE).fields
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [(left, right) for left, _, right in (each.partition(" ") for each in merges)]
    theirs = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for path in sorted(Path(__file__).parents[2].glob("docs/**/*.md")):
        text = path.read_text().replace("<|", "< |")
        assert ours(text, add_special_tokens=False)["input_ids"] == theirs.encode(text).ids, path
    assert ours("12345 Hello world", add_special_tokens=False)["input_ids"] == [33, 34, 35, 36, 37, 38699, 905]


def test_it_answers_a_question(folder: Path, model: Any):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
