"""Streams of the hf engine equal those of transformers in every supported model family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from capture_toys import random_rows
from coverings import gate_or_long
from model_families import FAMILIES, LAYERS, in_float64

from draftworks.capture.engine import load_engine
from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.storage.identity import LayerTap

ROWS = [row.input_ids.tolist() for row in random_rows(5, longest=60)]
TAPS = [LayerTap(k) for k in range(LAYERS)]

KINDS_OF_STATE = ("llama", "mistral", "qwen3_next", "qwen3_5_text", "gemma3", "deepseek_v3")
"""Families whose layers keep between two tokens of an answer what no other here does, and one within a wrapper."""


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, family_target: Callable[[str], TargetFiles]) -> HFTargetEngine:
    torch.set_num_threads(1)
    target = family_target(request.param)
    engine = load_engine(target, CaptureSpec(compute_dtype="float32", device="cpu"), torch.device("cpu"))
    in_float64(engine.model)
    return engine


def test_streams_are_those_of_the_model_that_was_saved(engine, request):
    """Load with the class that wrote the checkpoint; for a wrapper it differs from the class that capture loads."""
    name = request.node.callspec.params["engine"]
    saved = getattr(transformers, FAMILIES[name].model).from_pretrained(engine.model.name_or_path, dtype=torch.float32)
    with torch.no_grad():
        expected = in_float64(saved.eval())(torch.tensor([ROWS[0]]), output_hidden_states=True, use_cache=False)
    captured = engine.capture([ROWS[0]], TAPS)[0]
    for tap in TAPS:
        assert torch.equal(captured[tap.name], expected.hidden_states[tap.hf_index][0])
    assert torch.allclose(engine.head_logits(captured["last"]), expected.logits[0], atol=1e-9)


def test_a_padded_row_equals_the_row_alone(engine):
    for row, streams in zip(ROWS, engine.capture(ROWS, TAPS)):
        alone = engine.capture([row], TAPS)[0]
        assert all(torch.allclose(streams[name], alone[name], atol=1e-6) for name in alone)


@pytest.mark.parametrize("engine", gate_or_long(FAMILIES, KINDS_OF_STATE), indirect=True, scope="module")
def test_answers_are_those_of_transformers_whatever_else_is_in_the_batch(engine):
    """Batch rows end at different times; others join in their places, together with the states of their layers."""
    prompts = [row[:30] for row in ROWS]
    sampling = ResponseSpec(max_new_tokens=8, batch_size=3)
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made = engine.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
            expected.append(made[0, len(prompt) :].tolist())
    ends = {answer[1 + number] for number, answer in enumerate(expected)}
    found = engine.generate(prompts, sampling, [str(number) for number in range(len(prompts))], 128, end_ids=ends)
    for answer, whole in zip(found, expected):
        last = next(number for number, token in enumerate([*whole, *ends]) if token in ends)
        assert list(answer.ids) == whole[: last + 1]
    assert len({len(answer.ids) for answer in found}) > 1
