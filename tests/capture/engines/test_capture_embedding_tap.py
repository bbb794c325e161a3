"""The tap hf0 is read from the target's weights only if these are transformers' hidden_states[0].
Steps of small Llama models compute what the model itself does; models that they do not suit have none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, RevivedHost, fake_sglang
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from draftworks.capture.engine import EnginePlace, load_engine, make_engine_identity
from draftworks.capture.engines import llama_steps
from draftworks.capture.engines.caches import Frame, make_growing_cache
from draftworks.capture.engines.generate import generate
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.capture.engines.llama_steps import LlamaAnswers, find_steps
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.capture.engines.sglang_loading import has_plain_embeddings, require_plain_embeddings
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
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


STEP_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**STEP_SIZES, **changes})).eval()


@torch.inference_mode()
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_model_for_rows_that_stay(rope: str, tied: bool):
    model = make_llama(rope_parameters=ROPES[rope], tie_word_embeddings=tied)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)  # norms too
    ids, lengths = torch.randint(3, 40, (4, 12)), [7, 5, 7, 2]
    mask = torch.stack([(torch.arange(7) >= 7 - length).long() for length in lengths])
    cache = make_growing_cache(model)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(input_ids=ids[:, :7], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    steps = find_steps(model)
    assert steps is not None
    answers, starts = LlamaAnswers(steps), 7 - torch.tensor(lengths)
    answers.join(torch.tensor([], dtype=torch.int64), [cache], [torch.arange(4)], Frame(starts, 7, more=5))
    rows = torch.arange(4)
    for place in range(7, 12):
        if place == 9:
            rows = torch.tensor([3, 1])  # the last in the place of the first
            answers.keep(rows)
        found = answers.step(ids[rows, place], place - starts[rows], Frame(starts[rows], place, 12 - place))
        for row, logits in zip(rows.tolist(), found, strict=True):
            expected = model(ids[row : row + 1, 7 - lengths[row] : place + 1]).logits[0, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_without_such_steps(temperature: float, monkeypatch: pytest.MonkeyPatch):
    model = make_llama().double().float()
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
    sampling = ResponseSpec(max_new_tokens=24, temperature=temperature, batch_size=3)

    def answer():
        return generate(model, prompts, sampling, ["a", "b", "c", "d"], max_total=28, end_ids={17, 23})

    quick = answer()
    monkeypatch.setattr(llama_steps, "LARGEST", 0)
    assert find_steps(model) is None
    assert answer() == quick
    assert len({len(each.ids) for each in quick}) > 1


def test_models_of_other_forms_take_their_own_steps():
    assert find_steps(make_llama()) is not None
    assert find_steps(make_llama(attention_bias=True)) is None
    assert find_steps(make_llama(mlp_bias=True)) is None
    assert find_steps(make_llama(hidden_act="gelu")) is None
    assert find_steps(make_llama().bfloat16()) is None
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    assert find_steps(make_llama(rope_parameters=dynamic)) is None
    assert find_steps(MistralForCausalLM(MistralConfig(**STEP_SIZES)).eval()) is None
