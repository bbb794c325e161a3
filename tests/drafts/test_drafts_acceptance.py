"""Rung 1 of sampling servers is what verification accepts of a first proposal, on average over what the draft proposes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config.decoding import Decoding
from draftworks.drafts.acceptance import find_served_targets, measure_acceptance, name_served_sums
from draftworks.drafts.sampling import distribution, find_outcomes, find_target_distribution
from draftworks.drafts.strategy import Proposal

VOCAB = 6
SERVED = (
    Decoding(0.7, "greedy_draft"),
    Decoding(0.7, "rejection"),
    Decoding(1.3, "greedy_draft", top_k=3),
    Decoding(1.3, "rejection", top_k=4, top_p=0.8),
)


def accepted_by_verification(draft: torch.Tensor, target: torch.Tensor, decoding: Decoding) -> float:
    """The chance that one proposal is accepted, from every proposal that can be made."""
    p = find_target_distribution(target, decoding).expand(2, -1)
    if decoding.rule == "greedy_draft":
        return float(find_outcomes(Proposal(draft.argmax()[None]), p, by_block=False).chances[1])
    q = distribution(draft, decoding.temperature)
    chances = [find_outcomes(Proposal(torch.tensor([x]), q[None]), p, by_block=False).chances[1] for x in range(VOCAB)]
    return float(q @ torch.stack(chances))


@given(st.integers(0, 10_000))
def test_it_is_what_verification_accepts(seed: int):
    generator = torch.Generator().manual_seed(seed)
    draft, target = (2 * torch.randn(3, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    found = measure_acceptance(draft, find_served_targets(target, SERVED), SERVED)
    expected = [[accepted_by_verification(*rows, each) for rows in zip(draft, target)] for each in SERVED]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_with_a_reduced_vocabulary_the_targets_probability_is_of_all_its_tokens():
    """The likeliest token, with 0.6, is unknown to the draft, which says the second with certainty: 0.3 and not 0.75."""
    target, known = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([1, 2])
    served = (Decoding(1.0, "greedy_draft"), Decoding(1.0, "rejection"), Decoding(1.0, "greedy_draft", top_k=1))
    draft = torch.tensor([[50.0, 0.0]])
    found = measure_acceptance(draft, find_served_targets(target, served, known), served)
    assert found.flatten().tolist() == pytest.approx([0.3, 0.3, 0.0])


def test_sums_are_named_by_temperature_cuts_and_rule():
    named = name_served_sums(SERVED, torch.arange(8.0).view(4, 2))
    assert named["sampled_acceptance_t0.7_rejection_sums"].tolist() == [2, 3]
    assert named["sampled_acceptance_t1.3_k4_p0.8_rejection_sums"].tolist() == [6, 7]
    assert len(named) == len(SERVED)
