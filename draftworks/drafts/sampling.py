"""Speculative sampling: verify a chain so that the output is distributed as the target's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from draftworks.drafts.strategy import Proposal


@dataclass(frozen=True)
class Verdict:
    """The `accepted` leading proposals stand; `next_token` is the target's token after them."""

    accepted: int
    next_token: int


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at a temperature above 0, in at least float32."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)


def draw(probabilities: Tensor, generator: Generator | None) -> Tensor:
    """Draw one index from probabilities (V,), int64 scalar."""
    return torch.multinomial(probabilities, 1, generator=generator)[0]


def verify(proposal: Proposal, logits: Tensor, temperature: float, generator: Generator | None) -> Verdict:
    """Return how many proposals the target accepts, and its next token.

    Greedy: a proposal stands while it is the target's argmax. Sampled: proposal x of draft distribution q stands with
    probability min(1, p(x)/q(x)); the first that does not is replaced by a draw from max(p - q, 0), normalised; if the
    whole chain stands, the next token is drawn from p (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Args:
        logits: (k + 1, V) of the target: row i is its distribution at proposal i, the last row the one after all of
            them.
    """
    if temperature == 0:
        greedy = logits.argmax(-1)  # (k + 1,)
        accepted = int((greedy[:-1] == proposal.tokens).cumprod(0).sum())
        return Verdict(accepted, int(greedy[accepted]))
    if proposal.probabilities is None:
        raise ValueError("a proposal made at temperature 0 cannot be verified at another")
    target = distribution(logits, temperature)
    for index, token in enumerate(proposal.tokens.tolist()):
        p, q = target[index], proposal.probabilities[index].to(target.dtype)
        if torch.rand((), generator=generator, dtype=p.dtype, device=p.device) * q[token] < p[token]:
            continue
        residual = (p - q).clamp_min(0)
        # All zero only where p equals q to rounding; then p itself is the residual.
        return Verdict(index, int(draw(residual if residual.any() else p, generator)))
    return Verdict(len(proposal.tokens), int(draw(target[-1], generator)))
