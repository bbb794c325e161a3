"""Sampled decoding with any draft says what the target alone would: χ² of the first two tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draft_toys import VOCAB
from mtp_toys import mtp
from strategy_cases import make
from torch import Tensor

from draftworks.config.decoding import AcceptanceRule, Decoding
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.drafts.sampling import verify
from draftworks.drafts.strategy import Drafter, DraftStrategy
from draftworks.drafts.target_parts import TargetParts

NAMES = [name for name in list_strategies() if resolve_strategy(name).exports]
KNOWN, DRAWS = 6, 250


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "rejection") for name in NAMES), *((name, "greedy_draft") for name in ("dflash", "eagle3"))],
)
def test_sampled_decoding_keeps_the_targets_distribution(
    name: str, rule: AcceptanceRule, mtp_target: Callable[[str], TargetFiles]
):
    """Half of the target's first token is the draft's own, so that many are accepted; the second depends on the first."""
    torch.set_num_threads(1)
    strategy = mtp(TargetParts.load(mtp_target("deepseek_v3"))) if name == "mtp" else make(name, moved=0.2)
    drafter, generator = begin(strategy), torch.Generator().manual_seed(0)
    decoding = Decoding(1.0, rule)
    q = drafter.propose(1, 1.0, generator).probabilities
    assert q is not None
    vocab = q.shape[-1]
    few = 2 * torch.randn(vocab, generator=generator, dtype=torch.float64)
    few[VOCAB:] = -torch.inf  # so that no token is too rare to be counted
    first = (q[0].double() + few.softmax(-1)) / 2
    second = (few.roll(1), few.flip(0))  # after an even token, after an odd one
    said: list[list[int]] = [[], []]
    for _ in range(DRAWS):
        proposal = drafter.propose(2, decoding.draft_temperature, generator)
        logits = torch.stack([first.log(), *(second[token % 2] for token in proposal.tokens.tolist())])
        verdict = verify(proposal, logits, decoding, generator)
        tokens = [*proposal.tokens[: verdict.accepted].tolist(), verdict.next_token]
        for place, token in enumerate(tokens[:2]):
            said[place].append(token)
    stands = torch.minimum(q[0].double(), first)  # how often each first token stands, and a second follows
    if rule == "greedy_draft":
        stands = first * torch.nn.functional.one_hot(q[0].argmax(), vocab)
    odd = float(stands[1::2].sum() / stands.sum())
    follows = (1 - odd) * second[0].softmax(-1) + odd * second[1].softmax(-1)
    for tokens, expected in ((said[0], first), (said[1], follows)):
        assert len(tokens) > DRAWS / 4
        assert chi_squared(torch.tensor(tokens).bincount(minlength=vocab), len(tokens) * expected) < 3.5


def begin(strategy: DraftStrategy) -> Drafter:
    """A drafter that knows a few random rows."""
    width = strategy.config()["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    features = {name: torch.randn(KNOWN, width, generator=generator).double() for name in strategy.feature_names}
    drafter = strategy.drafter()
    drafter.extend(features, torch.randint(VOCAB, (KNOWN,), generator=generator))
    return drafter


def chi_squared(found: Tensor, expected: Tensor) -> float:
    """In standard deviations from its mean; rare tokens together."""
    rare = expected < 5
    found, expected = (
        torch.cat([each[~rare], each[rare].sum()[None]]) if rare.any() else each for each in (found.double(), expected)
    )
    freedom = len(found) - 1
    assert freedom > 3
    statistic = float(((found - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5
