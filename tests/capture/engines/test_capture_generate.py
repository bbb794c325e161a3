"""Generation gives what transformers' `generate` gives, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from capture_toys import random_rows
from hypothesis import given
from hypothesis import strategies as st

from draftworks.capture.engines.generate import find_end_tokens, generate
from draftworks.capture.engines.running_batch import list_rows_to_keep
from draftworks.capture.engines.sampling import choose_next_tokens, draw_uniforms
from draftworks.config.registry_files import ResponseSpec
from draftworks.errors import CaptureError

PROMPTS = [row.input_ids.tolist() for row in random_rows(9, seed=5)]
IDS = [f"p{i}" for i in range(len(PROMPTS))]


def generate_reference(model, prompt: list[int], **options) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_transformers(tiny_engine, penalty):
    sampling = ResponseSpec(max_new_tokens=40, repetition_penalty=penalty, batch_size=4)
    responses = generate(tiny_engine.model, PROMPTS, sampling, IDS, max_total=512)
    for prompt, response in zip(PROMPTS, responses):
        expected = generate_reference(tiny_engine.model, prompt, max_new_tokens=40, repetition_penalty=penalty)
        assert list(response.ids) == expected
        assert response.finished == (expected[-1] in find_end_tokens(tiny_engine.model))


def test_rows_that_end_leave_the_others_as_they_are(tiny_engine):
    sampling = ResponseSpec(max_new_tokens=40)
    free = generate(tiny_engine.model, PROMPTS, sampling, IDS, max_total=512)
    ends = {response.ids[number * 4] for number, response in enumerate(free[:5]) if len(response.ids) > number * 4}
    ended = generate(tiny_engine.model, PROMPTS, sampling, IDS, max_total=512, end_ids=ends)
    for one, other in zip(free, ended):
        first = next((i for i, token in enumerate(one.ids) if token in ends), None)
        assert other.ids == (one.ids if first is None else one.ids[: first + 1])
        assert other.finished == (one.finished if first is None else True)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}]
)
def test_sampling_does_not_depend_on_batch_size_or_order(tiny_engine, options):
    sampling = ResponseSpec(max_new_tokens=24, temperature=0.8, seed=3, batch_size=9, **options)
    together = generate(tiny_engine.model, PROMPTS, sampling, IDS, max_total=512)
    other = sampling.model_copy(update={"batch_size": 2})
    reverse = generate(tiny_engine.model, PROMPTS[::-1], other, IDS[::-1], max_total=512)[::-1]
    assert together == reverse


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_rows_that_decode_are_kept_and_only_the_last_ones_move(alive):
    kept = list_rows_to_keep(alive)
    assert sorted(kept) == [row for row, decodes in enumerate(alive) if decodes]
    assert all(row in (place, *range(len(kept), len(alive))) for place, row in enumerate(kept))


def test_seed_sample_and_turn_decide_the_random_numbers():
    sampling = ResponseSpec(temperature=1.0, max_new_tokens=20)
    base = draw_uniforms(sampling, "a", 0)
    longer = sampling.model_copy(update={"max_new_tokens": 50})
    assert np.array_equal(base, draw_uniforms(longer, "a", 0)[:20])
    others = [
        draw_uniforms(sampling, "b", 0),
        draw_uniforms(sampling, "a", 1),
        draw_uniforms(sampling.model_copy(update={"seed": 1}), "a", 0),
    ]
    assert all(not np.array_equal(base, other) for other in others)


def test_limits_cut_responses(tiny_engine):
    sampling = ResponseSpec(max_new_tokens=7)
    full, short, none = generate(
        tiny_engine.model, [[5] * 3, [6] * 9, [7] * 12], sampling, ["a", "b", "c"], max_total=12
    )
    assert len(full.ids) <= 7
    assert len(short.ids) <= 3
    assert none.ids == ()
    assert not none.finished


def test_empty_prompt_is_refused(tiny_engine):
    with pytest.raises(CaptureError, match="sample b: the prompt of turn 0 is empty"):
        generate(tiny_engine.model, [[5], []], ResponseSpec(), ["a", "b"], max_total=12)


def test_generation_leaves_the_global_generator_alone(tiny_engine):
    before = torch.get_rng_state()
    generate(tiny_engine.model, PROMPTS[:2], ResponseSpec(max_new_tokens=5, temperature=1), IDS[:2], max_total=64)
    assert torch.equal(before, torch.get_rng_state())


def warp(logits: torch.Tensor, sampling: ResponseSpec) -> torch.Tensor:
    """Return the probabilities that transformers' own logits processors give."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    return chain(None, logits).softmax(-1)


@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 3, 10]),
    st.sampled_from([0.3, 0.7, 0.95, 1.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_sampled_shares_are_those_of_transformers(seed, top_k, top_p, temperature):
    sampling = ResponseSpec(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 2
    count = 4000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = choose_next_tokens(logits.expand(count, -1), None, uniforms, sampling)
    shares = torch.bincount(tokens, minlength=12) / count
    assert torch.allclose(shares, warp(logits, sampling)[0], atol=2 / count)


def test_tokens_as_likely_as_the_last_of_the_best_count_too():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]).repeat_interleave(999, 0)
    uniforms = ((torch.arange(999, dtype=torch.float64) + 0.5) / 999).repeat(2)
    tokens = choose_next_tokens(logits, None, uniforms, ResponseSpec(temperature=1.0, top_k=2))
    assert [set(part.tolist()) for part in tokens.split(999)] == [{1, 2, 3, 4}, {0, 1}]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_k": 3, "top_p": 0.6}]
)
def test_tokens_are_the_same_in_a_dtype_that_numpy_lacks(options):
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(1)).bfloat16()  # with ties
    sampling, uniforms = ResponseSpec(**options), torch.linspace(0, 0.999, 64, dtype=torch.float64)
    chosen = [
        choose_next_tokens(each, None, uniforms if options else None, sampling) for each in (logits, logits.float())
    ]
    assert torch.equal(*chosen)


@given(st.integers(0, 1000), st.sampled_from([0, 4]), st.sampled_from([0.1, 0.6, 0.95]), st.booleans())
def test_tokens_that_are_impossible_change_nothing(seed, top_k, top_p, ties):
    logits = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.round() if ties else logits
    wide = torch.cat([logits, torch.full((16, 400), -torch.inf)], -1)
    sampling, uniforms = ResponseSpec(temperature=0.9, top_k=top_k, top_p=top_p), torch.linspace(0, 0.999, 16).double()
    chosen = [choose_next_tokens(each, None, uniforms, sampling) for each in (logits, wide)]
    assert torch.equal(*chosen)
