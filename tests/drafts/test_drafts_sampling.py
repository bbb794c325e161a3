"""Verification leaves the target's distribution as it is, whatever the draft and the rule: by enumeration, and by draws."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftworks.config.decoding import RULES, AcceptanceRule, Decoding
from draftworks.drafts.sampling import Outcomes, distribution, draw, find_outcomes, find_target_distribution, verify
from draftworks.drafts.strategy import Proposal

VOCAB = 5
Sequences = Mapping[tuple[int, ...], float]


def logits_of(seed: int, rows: int, scale: float) -> Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class World:
    """A target and a draft over V tokens, whose next token depends on the tokens before it.

    Args:
        lacks: tokens that the draft never proposes.
        sure: the target is sure of one token after these.
    """

    def __init__(
        self, vocab: int, length: int, seed: int, lacks: Iterable[int] = (), sure: tuple[int, ...] | None = None
    ):
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.length = vocab, length
        self.prefixes = [each for n in range(length + 1) for each in itertools.product(range(vocab), repeat=n)]
        self.p = {each: self._draw(generator) for each in self.prefixes}
        self.q = {each: self._without(self._draw(generator), lacks) for each in self.prefixes}
        if sure is not None:
            self.p[sure] = torch.eye(vocab, dtype=torch.float64)[self.q[sure].argmax()]

    def _draw(self, generator: torch.Generator) -> Tensor:
        return (2 * torch.randn(self.vocab, generator=generator, dtype=torch.float64)).softmax(0)

    def _without(self, q: Tensor, lacks: Iterable[int]) -> Tensor:
        q = q.index_fill(0, torch.tensor(list(lacks), dtype=torch.int64), 0.0)
        return q / q.sum()

    def proposals(self, rule: AcceptanceRule) -> Iterable[tuple[float, Proposal]]:
        """Every chain of proposals with its chance."""
        if rule == "greedy_draft":
            tokens: list[int] = []
            for _ in range(self.length):
                tokens.append(int(self.q[tuple(tokens)].argmax()))
            yield 1.0, Proposal(torch.tensor(tokens))
            return
        for tokens in itertools.product(range(self.vocab), repeat=self.length):
            rows = torch.stack([self.q[tokens[:i]] for i in range(self.length)])
            chance = math.prod(float(rows[i, token]) for i, token in enumerate(tokens))
            if chance:
                yield chance, Proposal(torch.tensor(tokens), rows)

    def verified(self, proposal: Proposal, by_block: bool) -> Outcomes:
        tokens = tuple(proposal.tokens.tolist())
        target = torch.stack([self.p[tokens[:i]] for i in range(self.length + 1)])
        return find_outcomes(proposal, target, by_block)

    def said(self) -> Sequences:
        """What the target alone says, `length` + 1 tokens."""
        everything = itertools.product(range(self.vocab), repeat=self.length + 1)
        return {tokens: self.chance(tokens, 0) for tokens in everything}

    def chance(self, tokens: tuple[int, ...], begin: int) -> float:
        """Of what the target goes on with, from `begin` on."""
        return math.prod(float(self.p[tokens[:i]][tokens[i]]) for i in range(begin, len(tokens)))

    def comes_out(self, rule: AcceptanceRule) -> Sequences:
        """What comes out of one pass, and of the target alone after it."""
        found: dict[tuple[int, ...], float] = defaultdict(float)
        for chance, proposal in self.proposals(rule):
            outcomes, proposed = self.verified(proposal, by_block=rule == "block"), tuple(proposal.tokens.tolist())
            for accepted, token in itertools.product(range(self.length + 1), range(self.vocab)):
                here = chance * float(outcomes.chances[accepted])
                if not here or not float(outcomes.residuals[accepted, token]):
                    continue
                begun = (*proposed[:accepted], token)
                for rest in itertools.product(range(self.vocab), repeat=self.length + 1 - len(begun)):
                    whole = (*begun, *rest)
                    found[whole] += here * float(outcomes.residuals[accepted, token]) * self.chance(whole, len(begun))
        return found

    def accepts(self, rule: AcceptanceRule) -> float:
        """How many tokens of a proposal are accepted on average."""
        counts = torch.arange(self.length + 1, dtype=torch.float64)
        by_block = rule == "block"
        return sum(
            chance * float(self.verified(one, by_block).chances @ counts) for chance, one in self.proposals(rule)
        )


WORLDS = {
    "two of three tokens": World(3, 2, seed=1),
    "three of two": World(2, 3, seed=2),
    "one of four": World(4, 1, seed=3),
    "likely tokens that the draft lacks": World(4, 2, seed=4, lacks=(0, 2)),
    "a target that is sure at first": World(3, 2, seed=5, sure=()),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WORLDS)
def test_every_sequence_comes_out_as_often_as_the_target_says_it(name: str, rule: AcceptanceRule):
    """Not by draws: every chain of proposals, every outcome, every token after it."""
    world = WORLDS[name]
    expected, found = world.said(), world.comes_out(rule)
    assert sum(found.values()) == pytest.approx(1)
    for tokens, chance in expected.items():
        assert found.get(tokens, 0.0) == pytest.approx(chance, abs=1e-12), tokens


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 3))
def test_by_block_a_greedy_draft_is_verified_as_token_by_token(seed: int, vocab: int, length: int):
    world = World(vocab, length, seed)
    [(_, proposal)] = world.proposals("greedy_draft")
    tokenwise, by_block = (world.verified(proposal, by_block=each) for each in (False, True))
    torch.testing.assert_close(by_block.chances, tokenwise.chances, rtol=0, atol=1e-12)
    possible = tokenwise.chances > 1e-9
    torch.testing.assert_close(by_block.residuals[possible], tokenwise.residuals[possible], rtol=0, atol=1e-9)


@given(st.integers(0, 10_000))
def test_by_block_as_many_are_accepted_as_token_by_token_or_more(seed: int):
    world = World(3, 2, seed)
    assert world.accepts("block") >= world.accepts("rejection") - 1e-12


def test_by_block_more_are_accepted_where_two_tokens_make_up_for_each_other():
    assert World(3, 2, seed=1).accepts("block") > World(3, 2, seed=1).accepts("rejection") + 0.01


def test_a_greedy_draft_is_accepted_with_the_targets_probability_of_its_token_and_replaced_by_the_others():
    target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    found = find_outcomes(Proposal(torch.tensor([1, 2])), target, by_block=False)
    assert found.chances.tolist() == pytest.approx([0.7, 0.3 * 0.7, 0.3 * 0.3])
    assert found.residuals[0].tolist() == pytest.approx([5 / 7, 0, 2 / 7])
    assert found.residuals[1].tolist() == pytest.approx([1 / 7, 6 / 7, 0])
    assert found.residuals[2].tolist() == pytest.approx([0.2, 0.2, 0.6])


def test_a_draft_that_draws_is_accepted_by_the_ratio_and_replaced_by_what_it_says_too_seldom():
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    found = find_outcomes(Proposal(torch.tensor([1]), torch.tensor([[0.1, 0.6, 0.3]])), target, by_block=False)
    assert found.chances.tolist() == pytest.approx([0.5, 0.5])
    assert found.residuals[0].tolist() == pytest.approx([1, 0, 0])


@pytest.mark.parametrize("by_block", [False, True])
def test_what_the_target_is_sure_of_is_always_accepted_from_a_draft_that_says_it(by_block: bool):
    target = torch.zeros(2, VOCAB)
    target[:, 3] = 1.0
    proposals = [Proposal(torch.tensor([3])), Proposal(torch.tensor([3]), torch.full((1, VOCAB), 1 / VOCAB))]
    for proposal in proposals:
        found = find_outcomes(proposal, target, by_block)
        assert found.chances.tolist() == [0.0, 1.0]
        assert torch.isfinite(found.residuals).all()
    refused = find_outcomes(Proposal(torch.tensor([1])), target, by_block)
    assert refused.chances.tolist() == [1.0, 0.0]
    assert refused.residuals[0].tolist() == target[0].tolist()


CUTS = {"uncut": {}, "top-k": {"top_k": 3}, "top-p": {"top_p": 0.7}, "both": {"top_k": 4, "top_p": 0.8}}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", CUTS)
def test_what_is_drawn_first_is_distributed_as_the_target_says(rule: AcceptanceRule, cut: str):
    """χ² of draws, with the temperature and the cuts of a server."""
    decoding = Decoding(0.7, rule, **CUTS[cut])
    draft, target = logits_of(2, 2, 1.5), logits_of(52, 3, 1.5)
    expected = find_target_distribution(target[0], decoding)
    generator, trials = torch.Generator().manual_seed(7), 2000
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    for _ in range(trials):
        counts[first_token(draft, target, decoding, generator)] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * trials
    chi_square = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    assert chi_square < 18.5  # of 4 degrees of freedom at most, exceeded once in a thousand


def first_token(draft: Tensor, target: Tensor, decoding: Decoding, generator: torch.Generator) -> int:
    """What comes out first of a proposal of two tokens and its verification."""
    if decoding.rule == "greedy_draft":
        proposal = Proposal(draft.argmax(-1))
    else:
        q = distribution(draft, decoding.temperature)
        proposal = Proposal(torch.stack([draw(row, generator) for row in q]), q)
    verdict = verify(proposal, target, decoding, generator)
    return int(proposal.tokens[0]) if verdict.accepted else verdict.next_token


def test_temperature_comes_first_then_top_k_then_top_p_of_what_is_left():
    """(4, 3, 2, 1) / 10: of the first two the likelier has 4/7, which is enough for half; of all four it has not."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    found = find_target_distribution(logits, Decoding(1.0, "rejection", top_k=2, top_p=0.5))
    assert found.tolist() == pytest.approx([1, 0, 0, 0])
    assert find_target_distribution(logits, Decoding(1.0, "rejection", top_k=2)).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    assert find_target_distribution(logits, Decoding(1.0, "rejection", top_p=0.5)).tolist() == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    cold = find_target_distribution(logits, Decoding(0.5, "rejection", top_p=0.5))  # (16, 9, 4, 1) / 30
    assert cold.tolist() == pytest.approx([1, 0, 0, 0])


def ascending(logits: Tensor, decoding: Decoding) -> Tensor:
    """The same as vLLM writes it: from the least likely on, what adds up to 1 - p or less goes."""
    scaled = logits / decoding.temperature
    ordered, ids = scaled.sort(dim=-1)
    if decoding.top_k is not None:
        ordered = ordered.masked_fill(ordered < ordered[..., -decoding.top_k :][..., :1], -torch.inf)
    gone = ordered.softmax(-1).cumsum(-1) <= 1 - decoding.top_p
    gone[..., -1] = False
    return torch.empty_like(ordered).scatter_(-1, ids, ordered.masked_fill(gone, -torch.inf)).softmax(-1)


@given(
    st.integers(0, 10_000),
    st.floats(0.2, 2.0),
    st.none() | st.integers(1, VOCAB),
    st.sampled_from([1.0, 0.95, 0.6, 0.1]),
)
def test_cuts_are_those_of_a_server_that_goes_the_other_way_round(
    seed: int, temperature: float, top_k: int | None, top_p: float
):
    decoding, logits = Decoding(temperature, "rejection", top_k, top_p), logits_of(seed, 4, 2.0)
    torch.testing.assert_close(find_target_distribution(logits, decoding), ascending(logits, decoding))


def test_a_draft_equal_to_the_target_is_always_accepted():
    target = logits_of(4, 4, 1.0)
    generator = torch.Generator().manual_seed(0)
    for rule in ("rejection", "block"):
        for _ in range(100):
            q = torch.stack([distribution(row, 1.0) for row in target[:3]])
            tokens = torch.stack([draw(row, generator) for row in q])
            assert verify(Proposal(tokens, q), target, Decoding(1.0, rule), generator).accepted == 3


@pytest.mark.parametrize("rule", RULES)
def test_a_token_the_target_never_says_is_never_accepted(rule: AcceptanceRule):
    target = torch.full((2, VOCAB), -torch.inf, dtype=torch.float64)
    target[:, 2] = 0.0
    q = None if rule == "greedy_draft" else torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    verdict = verify(Proposal(torch.tensor([1]), q), target, Decoding(1.0, rule), torch.Generator().manual_seed(0))
    assert (verdict.accepted, verdict.next_token) == (0, 2)


@pytest.mark.parametrize(
    ("make", "decoding"),
    [
        (lambda q: Proposal(torch.tensor([1]), q), Decoding(1.0, "greedy_draft")),
        (lambda q: Proposal(torch.tensor([1])), Decoding(1.0, "rejection")),
        (lambda q: Proposal(torch.tensor([1])), Decoding(1.0, "block")),
        (lambda q: Proposal(torch.tensor([1]), q), Decoding()),
    ],
)
def test_a_proposal_of_another_rule_is_not_verified(make: Callable[[Tensor], Proposal], decoding: Decoding):
    with pytest.raises(ValueError, match="expected a proposal at temperature"):
        verify(make(torch.full((1, VOCAB), 1 / VOCAB)), logits_of(1, 2, 1.0), decoding, None)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), st.integers(0, 10_000))
def test_greedy_accepts_exactly_the_prefix_that_equals_the_targets_argmax(tokens: list[int], seed: int):
    logits = logits_of(seed, len(tokens) + 1, 1.0)
    verdict = verify(Proposal(torch.tensor(tokens)), logits, Decoding(), None)
    said = logits.argmax(-1).tolist()
    assert tokens[: verdict.accepted] == said[: verdict.accepted]
    assert verdict.accepted == len(tokens) or tokens[verdict.accepted] != said[verdict.accepted]
    assert verdict.next_token == said[verdict.accepted]
