"""Speculative sampling: a chain is verified so that what comes out is distributed as the target alone would have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from draftworks.drafts.strategy import Proposal


@dataclass(frozen=True)
class Verdict:
    """`accepted` leading proposals stand; `next_token` is the target's own word after them."""

    accepted: int
    next_token: int


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at a temperature above 0, in at least float32."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)


def draw(probabilities: Tensor, generator: Generator | None) -> Tensor:
    """One index, int64 scalar."""
    return torch.multinomial(probabilities, 1, generator=generator)[0]


def verify(proposal: Proposal, logits: Tensor, temperature: float, generator: Generator | None) -> Verdict:
    """Which proposals the target accepts, and what it says next.

    Greedy: a proposal stands while it is the target's argmax. Sampled: proposal x of draft distribution q stands with
    probability min(1, p(x)/q(x)); the first that does not is replaced by a draw from max(p - q, 0), normalised, and after
    a chain that stands whole comes a draw from p (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Args:
        logits: (k + 1, V) of the target: row i says what comes where proposal i stands, the last what comes after all.
    """
    if temperature == 0:
        said = logits.argmax(-1)
        accepted = int((said[:-1] == proposal.tokens).cumprod(0).sum())
        return Verdict(accepted, int(said[accepted]))
    target = distribution(logits, temperature)
    for place, token in enumerate(proposal.tokens.tolist()):
        p, q = target[place], proposal.probabilities[place].to(target.dtype)
        if torch.rand((), generator=generator, dtype=p.dtype, device=p.device) * q[token] < p[token]:
            continue
        residual = (p - q).clamp_min(0)
        # All zero only where p equals q to rounding, and then p is what is left.
        return Verdict(place, int(draw(residual if residual.any() else p, generator)))
    return Verdict(len(proposal.tokens), int(draw(target[-1], generator)))
