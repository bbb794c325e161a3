"""Rung 4: ranks share prompts, differences are listed, and a measurement is made once and found again."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_toys import TAPS, TTT, Ladder, build_ladder, greedy_answers, make_draft
from report_toys import prompts
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.errors import StoreError
from draftworks.evaluation.ladder import loop as loop_module
from draftworks.evaluation.ladder.decoding import DecodingLimits, TargetSession, measure_draft_gap, speculate
from draftworks.evaluation.ladder.loop import DecodingLoop, LoopCache, LoopIdentity, Prompt
from draftworks.evaluation.ladder.measurement import LoopMeasurement, TimingContext
from draftworks.evaluation.ladder.prompt_acceptance import AnswerTrace, Difference
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.storage.identity import digest

VOCABULARY, PROMPT, ANSWER, PROPOSED = 50, 10, 12, 3


@pytest.mark.parametrize("window", [4, 9, 14, 64])
def test_proposals_are_forgotten_also_beyond_a_sliding_window(window: int):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = MistralForCausalLM(
        MistralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=window, **sizes)
    ).eval()
    said = torch.randint(VOCABULARY, (PROMPT + ANSWER,)).tolist()
    with torch.no_grad():
        whole = model(torch.tensor([said])).logits[0]
    session = TargetSession(model, rewinds=True)
    session.forward(said[:PROMPT])
    session.rewind_to(PROMPT)
    known = PROMPT
    while known + PROPOSED < len(said):
        accepted = known % (PROPOSED + 1)  # every number, from none to all
        proposed = [*said[known : known + 1 + accepted], *[0] * (PROPOSED - accepted)]
        found = session.forward(proposed).logits[: accepted + 1]
        torch.testing.assert_close(found, whole[known : known + 1 + accepted])
        known += accepted + 1
        session.rewind_to(known)


@pytest.fixture(scope="module")
def ladder(tiny_folder, tiny_target) -> Ladder:
    torch.set_num_threads(1)
    answers = greedy_answers(tiny_folder, prompts=5, max_new_tokens=20)
    return build_ladder(answers, tiny_target, steps=25, make=partial(make_draft, "eagle3"))


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


IDENTITY = LoopIdentity(
    weights_digest="a",
    strategy="eagle3",
    options={"ttt_length": 4, "layer_ids": [2, 4, 5]},
    target_digest="b",
    prompts="c",
    decoding=GREEDY,
    draft_tokens=4,
    stop_ids=(0, 2),
    max_new_tokens=64,
    max_length=None,
    compute_dtype="float32",
    seed=1,
    revision=1,
)
OTHERS: dict[str, Any] = {
    "weights_digest": "a2",
    "strategy": "dflash",
    "options": {"ttt_length": 4, "layer_ids": [2, 4, 6]},
    "target_digest": "b2",
    "prompts": "c2",
    "decoding": Decoding(0.5, "rejection"),
    "draft_tokens": 5,
    "stop_ids": (0,),
    "max_new_tokens": 65,
    "max_length": 512,
    "compute_dtype": "bfloat16",
    "seed": 2,
    "revision": 2,
}
MEASURED = LoopMeasurement(
    GREEDY,
    prompts([3, 1], [0], []),
    seconds=1.25,
    plain_seconds=0.1 + 0.2,
    tokens=9,
    plain_tokens=9,
    differences=(Difference("s0", "target", 3, 7, None, gap=1e-7), Difference("s1", "draft", 2, 7, 8, 0, 1, 0.25)),
    timing_context=TimingContext("a GPU", datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)),
)


@pytest.fixture
def cache(tmp_path: Path) -> LoopCache:
    return LoopCache.open(tmp_path / "new" / "loops")


def test_what_was_kept_is_found_with_when_and_where_it_was_timed(cache: LoopCache) -> None:
    for measured in (
        MEASURED,
        replace(MEASURED, differences=None, timing_context=None),
        replace(MEASURED, differences=()),
    ):
        cache.store(IDENTITY, measured)
        assert cache.find(IDENTITY).measurement == measured


def test_nothing_is_found_where_nothing_was_kept(cache: LoopCache) -> None:
    found = cache.find(IDENTITY)
    assert (found.measurement, found.problem) == (None, None)


@pytest.mark.parametrize("name", [field.name for field in fields(LoopIdentity)])
def test_everything_that_decides_a_loop_changes_its_key(name: str, cache: LoopCache) -> None:
    cache.store(IDENTITY, MEASURED)
    other = replace(IDENTITY, **{name: OTHERS[name]})
    assert other.key != IDENTITY.key
    assert cache.find(other).measurement is None


@pytest.mark.parametrize(
    "other",
    [
        Decoding(0.5, "greedy_draft"),
        Decoding(0.5, "block"),
        Decoding(0.7, "rejection"),
        Decoding(0.5, "rejection", top_k=9),
        Decoding(0.5, "rejection", top_p=0.9),
    ],
    ids=lambda each: each.suffix,
)
def test_rule_temperature_and_cuts_of_a_sampled_loop_are_in_its_key(other: Decoding, cache: LoopCache) -> None:
    sampled = replace(IDENTITY, decoding=Decoding(0.5, "rejection"))
    measured = replace(MEASURED, decoding=other, differences=None)
    cache.store(replace(sampled, decoding=other), measured)
    assert cache.find(sampled).measurement is None
    assert cache.find(replace(sampled, decoding=other)).measurement == measured


def test_a_sampled_loop_of_before_rules_were_named_is_measured_anew(cache: LoopCache) -> None:
    """Its draws were others; the rule was that of no server by default."""
    sampled = replace(IDENTITY, decoding=Decoding(0.5, "rejection"))
    without_rule = {name: value for name, value in sampled.to_json().items() if name != "rule"}
    assert digest(without_rule) != sampled.key
    assert digest(IDENTITY.to_json()) == IDENTITY.key
    assert "rule" not in IDENTITY.to_json()


def altered(entry: str) -> str:
    values = json.loads(entry)
    values["measurement"]["plain_seconds"] = 30.0
    return json.dumps(values)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda entry: "", "Invalid JSON"),
        (lambda entry: entry[: len(entry) // 2], "Invalid JSON"),
        (lambda entry: "{}", "measurement is missing"),
        (lambda entry: entry.replace('"schema_version": 1', '"schema_version": 2'), "schema_version.*found 2"),
        (altered, "is altered: expected"),
    ],
)
def test_damaged_entry_is_none_and_says_why(damage, reason: str, cache: LoopCache) -> None:
    path = cache.store(IDENTITY, MEASURED)
    path.write_text(damage(path.read_text()))
    found = cache.find(IDENTITY)
    assert found.measurement is None
    assert str(path) in found.problem
    assert re.search(reason, found.problem)
    cache.store(IDENTITY, MEASURED)
    assert cache.find(IDENTITY).measurement == MEASURED


def test_entry_of_another_loop_under_this_name_is_none_and_names_what_differs(cache: LoopCache) -> None:
    other = replace(IDENTITY, seed=7)
    cache.store(other, MEASURED).rename(cache.path(IDENTITY))
    found = cache.find(IDENTITY)
    assert found.measurement is None
    assert "of another loop: seed: expected 1, found 7" in found.problem


def test_entry_that_is_a_folder_is_none_and_says_so(cache: LoopCache) -> None:
    cache.path(IDENTITY).mkdir()
    assert "cannot be read" in cache.find(IDENTITY).problem
    with pytest.raises(StoreError, match="a loop measurement cannot be stored"):
        cache.store(IDENTITY, MEASURED)


def test_folder_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "loops").write_text("")
    with pytest.raises(StoreError, match="loops: expected the folder of the loop cache, which cannot be made"):
        LoopCache.open(tmp_path / "loops")


def test_no_staging_is_left_behind(cache: LoopCache) -> None:
    path = cache.store(IDENTITY, MEASURED)
    assert list(cache.folder.iterdir()) == [path]
