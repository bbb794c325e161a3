"""Differences between loop and walk: none where they agree; else whose it is, and how near to a tie."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from ladder_toys import TAPS, TTT, Ladder, build_ladder, eagle3, greedy_answers
from torch import Tensor

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.evaluation.ladder import loop as loop_module
from draftworks.evaluation.ladder.decoding import DecodingLimits, measure_draft_gap, speculate
from draftworks.evaluation.ladder.differences import AnswerTrace, Difference
from draftworks.evaluation.ladder.loop import DecodingLoop
from draftworks.evaluation.ladder.prompts import Prompt
from draftworks.evaluation.ladder.replay import replay_all


@pytest.fixture(scope="module")
def ladder(tiny_folder, tiny_target) -> Ladder:
    torch.set_num_threads(1)
    return build_ladder(greedy_answers(tiny_folder, prompts=5, max_new_tokens=20), tiny_target, steps=25, make=eagle3)


def traces(ladder: Ladder) -> dict[str, AnswerTrace]:
    names = {sample.name for sample in ladder.samples}
    found = replay_all(ladder.strategy, [ladder.batch(ladder.samples)], TTT, torch.device("cpu"), names)
    return {one.walk.sample_id: one.first_answer for one in found}


def differences(ladder: Ladder, walks: dict[str, AnswerTrace]) -> list[Difference]:
    loop = DecodingLoop(ladder.model, ladder.strategy, TAPS, ladder.limits, TTT, seed=0)
    prompts = [Prompt(sample.name, sample.prompt) for sample in ladder.samples]
    return list(loop.measure(prompts, GREEDY, walks).differences)


def gap(logits: Tensor) -> float:
    first, second = logits.double().topk(2).values.tolist()
    return first - second


def test_in_float64_nothing_differs(ladder: Ladder):
    assert differences(ladder, traces(ladder)) == []


def test_walks_are_kept_token_by_token_only_where_they_are_asked_for(ladder: Ladder):
    asked = ladder.samples[2]
    found = replay_all(ladder.strategy, [ladder.batch(ladder.samples)], TTT, torch.device("cpu"), {asked.name})
    [kept] = [one for one in found if one.first_answer is not None]
    assert (kept.walk.sample_id, kept.first_answer.answer) == (asked.name, asked.answer)
    assert [one.accepted for one in kept.first_answer.passes] == [one.accepted for one in spoken(ladder, 2).passes]
    assert kept.first_answer == spoken(ladder, 2).trace


def spoken(ladder: Ladder, index: int):
    return speculate(ladder.model, ladder.strategy, TAPS, ladder.samples[index].prompt, ladder.limits, TTT)


def test_target_that_says_other_tokens_is_listed_with_its_own_gap(ladder: Ladder):
    """The eval set was answered by the target, its weights have changed a little since."""
    changed = deepcopy(ladder.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.03 * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    found = differences(replace(ladder, model=changed), traces(ladder))
    answers = {sample.name: sample for sample in ladder.samples}
    said = [one for one in found if one.whose == "target"]
    assert said
    for one in said:
        sample = answers[one.sample_id]
        tokens = torch.tensor([[*sample.prompt, *sample.answer[: one.position]]])
        with torch.no_grad():
            logits = changed(tokens).logits[0, -1]
        assert (one.walk, one.loop) == (sample.answer[one.position], int(logits.argmax()))
        assert one.walk != one.loop
        assert one.gap == pytest.approx(gap(logits))


def test_draft_that_proposes_other_tokens_is_listed_with_its_own_gap(ladder: Ladder):
    """The walk saw features that were stored badly; the answers are the same."""
    generator = torch.Generator().manual_seed(0)

    def stored_badly(stream: Tensor) -> Tensor:
        return stream + 0.2 * stream.std() * torch.randn(stream.shape, generator=generator, dtype=stream.dtype)

    noisy = [
        replace(sample, features={name: stored_badly(each) for name, each in sample.features.items()})
        for sample in ladder.samples
    ]
    found = differences(ladder, traces(replace(ladder, samples=noisy)))
    assert found
    places = {sample.name: index for index, sample in enumerate(ladder.samples)}
    for one in found:
        assert one.whose == "draft"
        assert one.walk != one.loop
        logits = proposals_of(ladder, places[one.sample_id])[one.pass_number * TTT + one.place]
        assert int(ladder.strategy.model.draft_ids[logits.argmax()]) == one.loop
        assert one.gap == pytest.approx(gap(logits), abs=1e-9)


def proposals_of(ladder: Ladder, index: int) -> list[Tensor]:
    """Return the draft's logits for every proposal of a loop, in order."""
    logits: list[Tensor] = []
    hook = ladder.strategy.model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0, 0]))
    spoken(ladder, index)
    hook.remove()
    return logits


def test_gap_of_a_proposal_that_the_draft_does_not_make_is_unknown(ladder: Ladder):
    sample = ladder.samples[0]
    tokens = [*sample.prompt, *sample.answer[:4]]
    assert measure_draft_gap(ladder.model, ladder.strategy, TAPS, tokens, [0]) is None
    assert measure_draft_gap(ladder.model, ladder.strategy, TAPS, tokens, []) > 0


def test_sampled_loops_are_compared_with_no_walk_and_say_when_they_were_timed(ladder: Ladder):
    loop = DecodingLoop(ladder.model, ladder.strategy, TAPS, ladder.limits, TTT, seed=0)
    measured = loop.measure([Prompt("s", ladder.samples[0].prompt)], Decoding(0.7, "greedy_draft"))
    assert measured.differences is None
    assert "CPU, 1 thread" in measured.timing_context.device
    assert (datetime.now(UTC) - measured.timing_context.date).total_seconds() < 600


def test_what_a_prompt_draws_depends_on_its_sample_id_and_the_seed_alone(ladder: Ladder, monkeypatch):
    one, other = (Prompt(name, ladder.samples[0].prompt) for name in ("one", "other"))
    speculate_as_ever = loop_module.speculate

    def drawn(prompts: list[Prompt], seed: int = 0) -> dict[str, tuple]:
        """Return the random state and the acceptance of every prompt, by sample id."""
        seeds = {}

        def listening(*arguments):
            seeds[arguments[-1]] = arguments[-2].initial_seed()
            return speculate_as_ever(*arguments)

        monkeypatch.setattr(loop_module, "speculate", listening)
        loop = DecodingLoop(ladder.model, ladder.strategy, TAPS, DecodingLimits(6), TTT, seed)
        found = loop.measure(prompts, Decoding(1.0, "rejection")).prompts
        return {each.sample_id: (seeds[each.sample_id], each.passes, each.accepted, each.histogram) for each in found}

    together = drawn([one, other])
    assert together == drawn([other, one]) == drawn([other]) | drawn([one])
    assert together["one"][0] != together["other"][0], "the same tokens under another name"
    assert drawn([one], seed=1)["one"][0] != together["one"][0]
