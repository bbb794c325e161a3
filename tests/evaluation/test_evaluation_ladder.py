"""Rung 3 is rung 4, count for count; rung 4 says what the target alone would say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from ladder_toys import (
    TAPS,
    TTT,
    Answers,
    Ladder,
    Sample,
    build_ladder,
    dflash,
    domino,
    dspark,
    eagle3,
    greedy_answers,
    peagle,
)

from draftworks.evaluation.decoding import DecodingLimits, decode, speculate
from draftworks.evaluation.labels import collate_labels, label_agreement
from draftworks.evaluation.loop import Loop
from draftworks.evaluation.measure import Prompt
from draftworks.evaluation.replay import replay


@pytest.fixture(scope="module")
def answers(tiny_folder) -> Answers:
    torch.set_num_threads(1)
    return greedy_answers(tiny_folder, prompts=12, max_new_tokens=48)


@pytest.fixture(scope="module", params=[eagle3, dflash, domino, dspark, peagle], ids=lambda make: make.__name__)
def ladder(request, answers, tiny_target) -> Ladder:
    return build_ladder(answers, tiny_target, steps=60, make=request.param)


def test_the_walk_equals_the_real_loop_count_for_count(ladder: Ladder):
    replayed = {r.walk.sample_id: r.walk for r in replay(ladder.strategy, ladder.batch(ladder.samples), TTT)}
    accepted = 0
    for sample in ladder.samples:
        spoken = speculate(
            ladder.model, ladder.strategy, TAPS, sample.prompt, ladder.limits, TTT, sample_id=sample.name
        )
        assert spoken.tokens == sample.answer
        assert replayed[sample.name] == spoken.acceptance
        accepted += spoken.acceptance.accepted
    assert accepted > 40


def test_proposing_at_every_row_equals_proposing_on_a_live_sequence(ladder: Ladder):
    sample = ladder.samples[0]
    batch = ladder.batch([sample])
    rows = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    at_once = ladder.strategy.propose(batch, rows, TTT)[0]
    drafter, ids = ladder.strategy.drafter(), batch["input_ids"][0]
    for row in range(len(ids) - 1):
        features = {tap.name: sample.features[tap.name][row : row + 1] for tap in TAPS}
        drafter.extend(features, ids[row + 1 : row + 2])
        assert torch.equal(drafter.propose(TTT, 0.0, None).tokens, at_once[row])


def test_rows_that_are_not_asked_propose_nothing(ladder: Ladder):
    batch = ladder.batch(ladder.samples[:2])
    rows = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    rows[0, 3] = rows[1, 7] = True
    proposals = ladder.strategy.propose(batch, rows, 2)
    assert (proposals[~rows] == -1).all()
    assert (proposals[rows] >= 0).all()


def test_replay_does_not_depend_on_the_batch(ladder: Ladder):
    together = replay(ladder.strategy, ladder.batch(ladder.samples), TTT)
    alone = [replay(ladder.strategy, ladder.batch([sample]), TTT)[0] for sample in ladder.samples]
    assert together == alone
    assert len({len(sample.answer) for sample in ladder.samples}) > 1


def test_fewer_proposals_are_a_prefix_of_more(ladder: Ladder):
    batch = ladder.batch(ladder.samples)
    long, short = (replay(ladder.strategy, batch, count) for count in (TTT, 2))
    for more, fewer in zip(long, short):
        assert fewer.blocks.accepted <= more.blocks.accepted
        assert fewer.walk.passes >= more.walk.passes
        assert fewer.walk.emitted == more.walk.emitted


def test_every_pass_but_the_last_emits_what_it_accepted_and_one_more(ladder: Ladder):
    for sample in ladder.samples:
        walk = replay(ladder.strategy, ladder.batch([sample]), TTT)[0].walk
        assert walk.emitted == len(sample.answer) - 1
        assert walk.accepted + walk.passes - walk.emitted in (0, 1)


def test_token_limits_and_stop_tokens_end_an_answer_as_in_plain_decoding(ladder: Ladder):
    sample = ladder.samples[0]
    for limits in (DecodingLimits(1), DecodingLimits(7), DecodingLimits(20, sample.answer[5:6])):
        plain = decode(ladder.model, sample.prompt, limits)
        spoken = speculate(ladder.model, ladder.strategy, TAPS, sample.prompt, limits, TTT)
        assert spoken.tokens == plain.tokens
        assert spoken.acceptance.emitted == len(plain.tokens) - 1


THREE_TOKENS, SAMPLED_RUNS = DecodingLimits(3), 250


@pytest.fixture(scope="module")
def said_alone(answers) -> Counter[int]:
    """The third token of the target's own answers to a prompt, over many seeds."""
    generators = (torch.Generator().manual_seed(seed) for seed in range(SAMPLED_RUNS))
    prompt = answers.samples[1].prompt
    return Counter(decode(answers.model, prompt, THREE_TOKENS, 0.7, one).tokens[-1] for one in generators)


def test_sampled_answers_are_distributed_as_those_of_the_target_alone(ladder: Ladder, said_alone: Counter[int]):
    """The third token over many seeds, where two proposals have been verified: with the draft and without it."""
    prompt, said = ladder.samples[1].prompt, Counter()
    for seed in range(10_000, 10_000 + SAMPLED_RUNS):
        generator = torch.Generator().manual_seed(seed)
        spoken = speculate(ladder.model, ladder.strategy, TAPS, prompt, THREE_TOKENS, 2, 0.7, generator)
        said[spoken.tokens[-1]] += 1
    common = [token for token, _ in (said_alone + said).most_common(6)]
    rows = [[found[token] for token in common] for found in (said_alone, said)]
    rows = [[*row, SAMPLED_RUNS - sum(row)] for row in rows]
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in zip(*rows) if a + b)
    assert chi_square < 22.5  # of 6 degrees of freedom, exceeded once in a thousand


def test_a_sampled_prompt_gives_the_same_answer_for_the_same_seed(ladder: Ladder):
    def spoken(seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        limits = DecodingLimits(24)
        return speculate(
            ladder.model, ladder.strategy, TAPS, ladder.samples[0].prompt, limits, TTT, 1.0, generator
        ).tokens

    assert spoken(1) == spoken(1)
    assert len({spoken(seed) for seed in range(4)}) > 1


def cut(sample: Sample, length: int) -> Sample:
    features = {name: stream[:length] for name, stream in sample.features.items()}
    return replace(sample, answer=sample.answer[: length - len(sample.prompt)], features=features)


def test_measured_loops_equal_the_walks_over_answers_cut_to_the_same_length(ladder: Ladder):
    length = max(len(sample.prompt) for sample in ladder.samples) + 12
    samples = [cut(sample, length) for sample in ladder.samples]
    loop = Loop(ladder.model, ladder.strategy, TAPS, ladder.limits, TTT, seed=0, max_length=length)
    measured = loop.measure([Prompt(sample.name, sample.prompt) for sample in samples], temperature=0.0)
    walks = [one.walk for one in replay(ladder.strategy, ladder.batch(samples), TTT)]
    assert sorted(walks, key=lambda walk: walk.sample_id) == list(measured.prompts)
    assert measured.tokens == measured.plain_tokens == sum(len(sample.answer) for sample in samples)
    assert measured.speed_up > 0


def test_greedy_answers_agree_with_the_targets_argmax_and_others_do_not(ladder: Ladder):
    samples, head = [sample.tensors() for sample in ladder.samples], ladder.model.get_output_embeddings().weight
    names = [sample.name for sample in ladder.samples]
    assert label_agreement([collate_labels(samples, names)], head, torch.device("cpu")) == 1.0
    others = [{**sample, "input_ids": sample["input_ids"].roll(1)} for sample in samples]
    assert label_agreement([collate_labels(others, names)], head, torch.device("cpu")) < 0.5
