"""Speculative sampling leaves the target's distribution as it is, whatever the draft."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftworks.drafts.sampling import distribution, draw, verify
from draftworks.drafts.strategy import Proposal

VOCAB = 5


def logits_of(seed: int, rows: int, scale: float) -> Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def first_token(draft: Tensor, target: Tensor, temperature: float, generator: torch.Generator) -> int:
    """What comes out first of one proposal of a token and its verification."""
    q = distribution(draft, temperature)
    token = draw(q, generator)
    proposal = Proposal(token[None], q[None])
    verdict = verify(proposal, target, temperature, generator)
    return int(token) if verdict.accepted else verdict.next_token


@pytest.mark.parametrize(("seed", "scale", "temperature"), [(1, 1.0, 1.0), (2, 3.0, 0.7), (3, 0.1, 1.5)])
def test_what_comes_out_is_distributed_as_the_target_says(seed: int, scale: float, temperature: float):
    draft, target = logits_of(seed, 1, scale)[0], logits_of(seed + 50, 2, scale)
    generator = torch.Generator().manual_seed(seed)
    trials = 6000
    counts = torch.zeros(VOCAB)
    for _ in range(trials):
        counts[first_token(draft, target, temperature, generator)] += 1
    expected = distribution(target[0], temperature).float() * trials
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # of 4 degrees of freedom, exceeded once in a thousand


def test_a_draft_equal_to_the_target_is_always_accepted():
    target = logits_of(4, 4, 1.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        q = torch.stack([distribution(row, 1.0) for row in target[:3]])
        tokens = torch.stack([draw(row, generator) for row in q])
        assert verify(Proposal(tokens, q), target, 1.0, generator).accepted == 3


def test_a_token_the_target_never_says_is_never_accepted():
    target = torch.full((2, VOCAB), -torch.inf, dtype=torch.float64)
    target[:, 2] = 0.0
    q = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    verdict = verify(Proposal(torch.tensor([1]), q), target, 1.0, torch.Generator().manual_seed(0))
    assert (verdict.accepted, verdict.next_token) == (0, 2)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), st.integers(0, 10_000))
def test_greedy_accepts_exactly_the_prefix_that_equals_the_targets_argmax(tokens: list[int], seed: int):
    logits = logits_of(seed, len(tokens) + 1, 1.0)
    verdict = verify(Proposal(torch.tensor(tokens)), logits, 0.0, None)
    said = logits.argmax(-1).tolist()
    assert tokens[: verdict.accepted] == said[: verdict.accepted]
    assert verdict.accepted == len(tokens) or tokens[verdict.accepted] != said[verdict.accepted]
    assert verdict.next_token == said[verdict.accepted]
