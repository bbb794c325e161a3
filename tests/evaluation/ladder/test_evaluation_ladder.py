"""Rung 3 equals rung 4 count for count, and rung 4 gives the answers of the target alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from coverings import gate_or_long
from ladder_toys import (
    TAPS,
    TTT,
    Answers,
    Ladder,
    Sample,
    build_ladder,
    make_draft,
    short_answers,
)
from strategy_cases import find_cases
from torch import Tensor

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.drafts.sampling import Verdict, verify
from draftworks.drafts.strategy import Proposal
from draftworks.evaluation.evaluator import collate_labels, count_labels
from draftworks.evaluation.ladder.decoding import DecodingLimits, decode, speculate
from draftworks.evaluation.ladder.loop import DecodingLoop, Prompt
from draftworks.evaluation.ladder.replay import replay

HOT = Decoding(0.8, "rejection")


@pytest.fixture(scope="module")
def answers(tiny_folder) -> Answers:
    torch.set_num_threads(1)
    return short_answers(tiny_folder)


@pytest.fixture(scope="module", params=find_cases())
def ladder(request, answers, tiny_target) -> Ladder:
    return build_ladder(answers, tiny_target, steps=50, make=partial(make_draft, request.param))


# What is the loop's own asks of a draft only that it proposes: one that makes chains, and one that makes blocks.
OF_A_CHAIN_AND_BLOCKS = pytest.mark.parametrize(
    "ladder",
    gate_or_long(find_cases(), ["eagle3", "dflash"]),
    indirect=True,
    scope="module",
)


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
    assert accepted > 5


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
        assert fewer.walk.emitted == more.walk.emitted
    longest = max(count for one in long for count, passes in enumerate(one.walk.histogram) if passes)
    assert (sum(one.walk.passes for one in short) > sum(one.walk.passes for one in long)) == (longest > 2)


def test_every_pass_but_the_last_emits_what_it_accepted_and_one_more(ladder: Ladder):
    for sample in ladder.samples:
        walk = replay(ladder.strategy, ladder.batch([sample]), TTT)[0].walk
        assert walk.emitted == len(sample.answer) - 1
        assert walk.accepted + walk.passes - walk.emitted in (0, 1)


@OF_A_CHAIN_AND_BLOCKS
def test_token_limits_and_stop_tokens_end_an_answer_as_in_plain_decoding(ladder: Ladder):
    sample = ladder.samples[0]
    for limits in (DecodingLimits(1), DecodingLimits(7), DecodingLimits(20, sample.answer[5:6])):
        plain = decode(ladder.model, sample.prompt, limits)
        spoken = speculate(ladder.model, ladder.strategy, TAPS, sample.prompt, limits, TTT)
        assert spoken.tokens == plain.tokens
        assert spoken.acceptance.emitted == len(plain.tokens) - 1


@OF_A_CHAIN_AND_BLOCKS
def test_what_is_verified_while_sampling_are_the_targets_own_logits_of_the_sequence(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch
):
    """That `verify` keeps the target's distribution is tested beside it; here, that it is given what it needs for that."""
    seen: list[tuple[Proposal, Tensor, Verdict]] = []

    def recorded(proposal: Proposal, logits: Tensor, *how: object) -> Verdict:
        seen.append((proposal, logits, verify(proposal, logits, *how)))
        return seen[-1][2]

    monkeypatch.setattr("draftworks.evaluation.ladder.decoding.verify", recorded)
    generator, accepted = torch.Generator().manual_seed(3), set()
    for sample in ladder.samples[:4]:
        seen.clear()
        spoken = speculate(ladder.model, ladder.strategy, TAPS, sample.prompt, DecodingLimits(24), TTT, HOT, generator)
        said = [*sample.prompt, spoken.tokens[0]]
        for proposal, logits, verdict in seen:
            proposed = proposal.tokens.tolist()
            alone = ladder.model(torch.tensor([[*said, *proposed]])).logits[0, -len(proposed) - 1 :]
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-9)
            said += [*proposed[: verdict.accepted], verdict.next_token]
            accepted.add(verdict.accepted)
        assert said[len(sample.prompt) :][: len(spoken.tokens)] == list(spoken.tokens)
    assert len(accepted) > 1


def test_proposals_are_drawn_from_the_probabilities_they_carry(ladder: Ladder):
    """Log probabilities of what is drawn add up to what their entropy promises; a temperature of half squares them."""
    sample, temperature = ladder.samples[0], 0.7
    end = len(sample.prompt) + 4
    drafter = ladder.strategy.drafter()
    tokens = torch.tensor([*sample.prompt, *sample.answer])
    drafter.extend({tap.name: sample.features[tap.name][:end] for tap in TAPS}, tokens[1 : end + 1])
    generator = torch.Generator().manual_seed(0)
    surprise, variance = torch.zeros(TTT, dtype=torch.float64), torch.zeros(TTT, dtype=torch.float64)
    for _ in range(100):
        proposal = drafter.propose(TTT, temperature, generator)
        q = proposal.probabilities.double()
        torch.testing.assert_close(q.sum(-1), torch.ones(TTT, dtype=torch.float64))
        drawn = q.gather(1, proposal.tokens[:, None])[:, 0].log()
        mean = torch.special.entr(q).sum(-1)
        surprise += drawn + mean
        variance += (torch.xlogy(q, q) * torch.where(q > 0, q.log(), 0.0)).sum(-1) - mean**2
    assert (surprise.abs() < 6 * variance.sqrt()).all()
    first = drafter.propose(1, temperature, generator).probabilities[0].double()
    colder = drafter.propose(1, temperature / 2, generator).probabilities[0].double()
    torch.testing.assert_close(colder, first**2 / (first**2).sum(), rtol=1e-4, atol=1e-6)


@OF_A_CHAIN_AND_BLOCKS
def test_a_sampled_prompt_gives_the_same_answer_for_the_same_seed(ladder: Ladder):
    def spoken(seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        limits = DecodingLimits(24)
        return speculate(
            ladder.model, ladder.strategy, TAPS, ladder.samples[0].prompt, limits, TTT, HOT, generator
        ).tokens

    answer = spoken(1)
    assert spoken(1) == answer
    assert any(spoken(seed) != answer for seed in (0, 2, 3))


def cut(sample: Sample, length: int) -> Sample:
    features = {name: stream[:length] for name, stream in sample.features.items()}
    return replace(sample, answer=sample.answer[: length - len(sample.prompt)], features=features)


@OF_A_CHAIN_AND_BLOCKS
def test_measured_loops_equal_the_walks_over_answers_cut_to_the_same_length(ladder: Ladder):
    length = max(len(sample.prompt) for sample in ladder.samples) + 12
    samples = [cut(sample, length) for sample in ladder.samples]
    loop = DecodingLoop(ladder.model, ladder.strategy, TAPS, ladder.limits, TTT, seed=0, max_length=length)
    measured = loop.measure([Prompt(sample.name, sample.prompt) for sample in samples], GREEDY)
    walks = [one.walk for one in replay(ladder.strategy, ladder.batch(samples), TTT)]
    assert sorted(walks, key=lambda walk: walk.sample_id) == list(measured.prompts)
    assert measured.tokens == measured.plain_tokens == sum(len(sample.answer) for sample in samples)
    assert measured.speed_up > 0


def test_greedy_answers_agree_with_the_targets_argmax_and_others_do_not(answers: Answers):
    samples, head = [sample.tensors() for sample in answers.samples], answers.model.get_output_embeddings().weight
    names = [sample.name for sample in answers.samples]
    assert count_labels([collate_labels(samples, names)], head, torch.device("cpu")).agreement == 1.0
    others = [{**sample, "input_ids": sample["input_ids"].roll(1)} for sample in samples]
    assert count_labels([collate_labels(others, names)], head, torch.device("cpu")).agreement < 0.5
