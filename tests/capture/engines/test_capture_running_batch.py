"""Prompts join the batch of answers as others end, within a budget of memory, and no answer is another for it."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from capture_toys import random_rows

from draftworks.capture.engine import AskedPrompt
from draftworks.capture.engines import llama_steps
from draftworks.capture.engines.caches import RowSize, make_growing_cache
from draftworks.capture.engines.generate import answer_stream, generate
from draftworks.capture.engines.running_batch import READ_TOKENS, READ_WASTE, run_model
from draftworks.config.registry_files import ResponseSpec

PROMPTS = [row.input_ids.tolist() for row in random_rows(12, seed=8, longest=90)]
IDS = [f"p{number}" for number in range(len(PROMPTS))]
SAMPLING = ResponseSpec(max_new_tokens=30, batch_size=6)


@pytest.fixture(params=["own steps", "the model's steps"])
def model(request, tiny_engine, monkeypatch):
    if request.param != "own steps":
        monkeypatch.setattr(llama_steps, "LARGEST", 0)
    return tiny_engine.model


def ask(prompts=PROMPTS) -> deque[AskedPrompt]:
    return deque(AskedPrompt(name, tuple(prompt)) for name, prompt in zip(IDS, prompts, strict=False))


def choose_ends(model) -> set[int]:
    """Return tokens at which some answers end early and others do not."""
    free = generate(model, PROMPTS, SAMPLING, IDS, max_total=512)
    return {answer.ids[3 + number] for number, answer in enumerate(free[:4]) if len(answer.ids) > 3 + number}


@torch.inference_mode()
def measure_column(model) -> int:
    cache, one = make_growing_cache(model), torch.zeros(1, 1, dtype=torch.int64)
    run_model(model, one, None, one, cache)
    return RowSize.of(cache).count_bytes(1)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_budget_of_memory_changes_how_many_run_and_no_answer(model, temperature):
    sampling, ends = SAMPLING.model_copy(update={"temperature": temperature}), choose_ends(model)
    expected = generate(model, PROMPTS, sampling, IDS, max_total=512, end_ids=ends)
    column, longest = measure_column(model), max(map(len, PROMPTS)) + 30
    for budget in (0, 2 * longest * column):
        waiting, found, most, read = ask(), {}, 0, 0
        for advance in answer_stream(model, waiting, sampling, 512, ends, budget):
            found |= {each.asked.sample_id: each.answer for each in advance.answered}
            most = max(most, advance.made)
            read += advance.read
        assert [found[name] for name in IDS] == expected
        assert most == 1 if budget == 0 else 1 < most < 6
        assert read == sum(map(len, PROMPTS))


def test_answers_that_outgrow_the_budget_give_their_places_up_and_go_on_later(model):
    """A first answer of two tokens lets more begin than there is room for when the others are long."""
    prompts, sampling = [[7] * 118, *([5, 6, number] for number in range(20, 24))], ResponseSpec(max_new_tokens=100)
    expected = generate(model, prompts, sampling, IDS[:5], max_total=120)
    found, read = {}, 0
    for advance in answer_stream(model, ask(prompts), sampling, 120, budget=3 * 75 * measure_column(model)):
        found |= {each.asked.sample_id: each.answer for each in advance.answered}
        read += advance.read
    assert [found[name] for name in IDS[:5]] == expected
    assert read > sum(map(len, prompts))


def test_what_is_added_while_others_run_is_answered_before_what_waited(model):
    alone = generate(model, [PROMPTS[0], PROMPTS[1]], SAMPLING, ["first", "later"], max_total=512, turn=0)
    waiting, order = ask(PROMPTS[2:]), []
    waiting.appendleft(AskedPrompt("first", tuple(PROMPTS[0])))
    for advance in answer_stream(model, waiting, SAMPLING.model_copy(update={"batch_size": 1}), 512):
        order += [(each.asked.sample_id, each.answer) for each in advance.answered]
        if [name for name, _ in order] == ["first"] and advance.answered:
            waiting.appendleft(AskedPrompt("later", tuple(PROMPTS[1])))
    assert order[:2] == [("first", alone[0]), ("later", alone[1])]
    assert len(order) == len(PROMPTS)


def test_prompts_are_read_once_and_hardly_padded(model, monkeypatch):
    """A batch with every prompt padded to the longest reads several times as many tokens."""
    prompts = [
        [5 + number % 9] * length for number, length in enumerate([3, 200, 40, 41, 190, 42, 44, 8, 120, 43, 7, 45])
    ]
    read, forward = [], model.forward

    def watch(input_ids, **options):
        read.append(input_ids.shape)
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", watch)
    generate(model, prompts, SAMPLING.model_copy(update={"batch_size": 12}), IDS, max_total=512)
    groups = [shape for shape in read if shape[1] > 1]
    total = sum(map(len, prompts))
    assert total <= sum(shape.numel() for shape in groups) <= total / (1 - READ_WASTE)
    assert all(shape.numel() <= max(READ_TOKENS, shape[1]) for shape in groups)
    assert len(groups) < len(prompts)  # those of about the same length together


def test_a_place_that_gets_free_is_taken_while_others_decode(model):
    waiting, decoded = ask(), []
    for advance in answer_stream(model, waiting, SAMPLING, 512, choose_ends(model)):
        if waiting and not advance.read:
            decoded.append(advance.made)
    assert decoded.count(6) > len(decoded) / 2  # an answer may be its first token only
