"""Speculative sampling: verify a chain so that the output is distributed as the target's own, by the rule of a server.

With p the target's distributions and q the draft's, each at the place of a proposed token x_i, all rules are made of

    stands        the probability that x_i is accepted once all before it are: min(1, p(x_i) / q(x_i))
    residual      what the next token is drawn from after a rejection there: max(p - q, 0), normalised

(Leviathan et al., arXiv 2211.17192, algorithm 1). A greedy draft proposes its argmax, so its q is 1 there and 0 elsewhere: x_i
stands with probability p(x_i), and the residual is p without x_i. Block verification (Sun et al., arXiv 2403.10444, algorithm
2) accepts the longest prefix that stands as a whole, with w_i = min(1, w_{i-1} p(x_i) / q(x_i)), w_0 = 1:

    r_i = Σ max(w_i p - q, 0) at the place after x_i,   stands = r_i / (r_i + 1 - w_i), and w_k for the last one
    residual      max(w_i p - q, 0) there, normalised

With a greedy draft that is the same distribution as token by token.

At a label, token by token (rung 1 above temperature 0), the expectation of `stands` over what the draft proposes, with p cut
as the server cuts it, is

    greedy_draft    p at the argmax of q; with a reduced vocabulary p is still over all the target's tokens
    rejection       Σ_v min(p_v, q_v), q at the temperature and uncut
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from draftworks.config.decoding import Decoding
from draftworks.drafts.logit_losses import find_argmax
from draftworks.drafts.strategy import Proposal


@dataclass(frozen=True)
class Verdict:
    """The `accepted` leading proposals stand; `next_token` is the target's token after them."""

    accepted: int
    next_token: int


@dataclass(frozen=True)
class Outcomes:
    """Every possible outcome of verifying k proposals.

    Attributes:
        chances: (k + 1,) float64, the probability that exactly so many are accepted.
        residuals: (k + 1, V), what the next token is drawn from then. Rows of chance 0 mean nothing.
    """

    chances: Tensor
    residuals: Tensor


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at a temperature above 0, in at least float32."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)


def find_target_distribution(logits: Tensor, decoding: Decoding) -> Tensor:
    """Return the target's distribution above temperature 0, cut as `Decoding` says, (…, V) in at least float32.

    Top-k keeps all that are as likely as the k-th; top-p keeps a token if those that are likelier have less mass than p, as
    in vLLM. (SGLang also keeps it if they have exactly p.)
    """
    probabilities = distribution(logits, decoding.temperature)
    if decoding.top_k is not None and decoding.top_k < probabilities.shape[-1]:
        least = probabilities.topk(decoding.top_k, dim=-1).values[..., -1:]
        probabilities = _normalize(probabilities.masked_fill(probabilities < least, 0))
    if decoding.top_p < 1:
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(ordered, dtype=torch.bool).scatter(-1, ids, before >= decoding.top_p)
        probabilities = _normalize(probabilities.masked_fill(dropped, 0))
    return probabilities


def _normalize(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def draw(probabilities: Tensor, generator: Generator | None) -> Tensor:
    """Draw one index from probabilities (V,), int64 scalar."""
    return torch.multinomial(probabilities, 1, generator=generator)[0]


def choose_token(logits: Tensor, decoding: Decoding, generator: Generator | None) -> int:
    """Return the token that the target says by itself, from its logits (V,)."""
    if decoding.temperature == 0:
        return int(logits.argmax())
    return int(draw(find_target_distribution(logits, decoding), generator))


def verify(proposal: Proposal, logits: Tensor, decoding: Decoding, generator: Generator | None) -> Verdict:
    """Return how many proposals the target accepts, and its next token.

    Greedy: a proposal stands while it is the target's argmax.

    Args:
        logits: (k + 1, V) of the target: row i is its distribution at proposal i, the last row the one after all of
            them.

    Raises:
        ValueError: the proposal was made at another temperature than the rule wants.
    """
    if (proposal.probabilities is None) != (decoding.draft_temperature == 0):
        raise ValueError(
            f"rule {decoding.rule}: expected a proposal at temperature {decoding.draft_temperature:g}, found one at another"
        )
    if decoding.temperature == 0:
        greedy = logits.argmax(-1)  # (k + 1,)
        accepted = int((greedy[:-1] == proposal.tokens).cumprod(0).sum())
        return Verdict(accepted, int(greedy[accepted]))
    outcomes = find_outcomes(proposal, find_target_distribution(logits, decoding), by_block=decoding.rule == "block")
    accepted = int(draw(outcomes.chances, generator))
    return Verdict(accepted, int(draw(outcomes.residuals[accepted], generator)))


def find_outcomes(proposal: Proposal, target: Tensor, by_block: bool) -> Outcomes:
    """Return all that can come of a proposal.

    Args:
        target: (k + 1, V), the target's distributions; the last row is the one after all proposals.
        by_block: block verification, instead of token by token.
    """
    tokens, count = proposal.tokens, len(proposal.tokens)
    places, p = torch.arange(count, device=tokens.device), target.double()
    q = torch.zeros_like(p)  # (k + 1, V): nothing is proposed at the last place
    if proposal.probabilities is None:
        q[places, tokens] = 1
    else:
        q[:-1] = proposal.probabilities
    ratios = p[places, tokens] / q[places, tokens]  # (k,)
    if by_block:
        weights = _find_prefix_weights(ratios)  # (k + 1,)
        above = (weights[:, None] * p - q).clamp_min(0)  # (k + 1, V)
        chances = _find_block_chances(weights, above.sum(-1))
    else:
        above = (p - q).clamp_min(0)
        chances = _find_token_chances(ratios.clamp_max(1))
    # All zero only where p equals q to rounding; then p itself is the residual.
    return Outcomes(chances, _normalize(torch.where(above.any(-1, keepdim=True), above, p)))


def _find_token_chances(stands: Tensor) -> Tensor:
    """Return the chance that exactly 0 … k tokens are accepted, from the chance of each, (k,), once all before it are."""
    reached = torch.cat([stands.new_ones(1), stands.cumprod(0)])  # (k + 1,)
    return reached * torch.cat([1 - stands, stands.new_ones(1)])


def _find_prefix_weights(ratios: Tensor) -> Tensor:
    """Return w_0 … w_k."""
    weights = [ratios.new_ones(())]
    for ratio in ratios:
        weights.append((weights[-1] * ratio).clamp_max(1))
    return torch.stack(weights)


def _find_block_chances(weights: Tensor, masses: Tensor) -> Tensor:
    """Return the chance that exactly 0 … k tokens are accepted: the longest prefix that stands is.

    Args:
        weights, masses: (k + 1,), w_i and r_i.
    """
    rest = masses + (1 - weights)  # in this order no quotient is above 1
    stands = torch.where(rest > 0, masses / rest.where(rest > 0, torch.ones_like(rest)), 1.0)
    stands = torch.cat([stands.new_ones(1), stands[1:-1], weights[-1:]])
    longer_fail = (1 - stands[1:]).flip(0).cumprod(0).flip(0)  # (k,), none of those after i stands
    return stands * torch.cat([longer_fail, stands.new_ones(1)])


PREFIX = "sampled_acceptance_"
"""Of the names of the metric sums; the rest is `Decoding.suffix`."""


def find_served_targets(logits: Tensor, served: Sequence[Decoding], known: Tensor | None = None) -> Tensor:
    """Return the target's probabilities at labels by each decoding, (d, n, V), of its logits there (n, V).

    Args:
        known: (V_d,) int64, the tokens that the draft knows: the probabilities of those alone, (d, n, V_d).
    """
    by_target: dict[Decoding, Tensor] = {}
    for decoding in served:
        if decoding.target not in by_target:
            found = find_target_distribution(logits, decoding)
            by_target[decoding.target] = found if known is None else found[:, known]
    return torch.stack([by_target[decoding.target] for decoding in served])


@torch.no_grad()
def measure_acceptance(logits: Tensor, targets: Tensor, served: Sequence[Decoding]) -> Tensor:
    """Return how likely the draft's token is accepted at n labels by each of d decodings, (d, n).

    Args:
        logits: (n, V), the draft's.
        targets: (d, n, V), from `find_served_targets`.
    """
    logits = logits.detach()
    likeliest = find_argmax(logits)[:, None]  # (n, 1)
    found = [
        target.gather(-1, likeliest)[:, 0]
        if decoding.rule == "greedy_draft"
        else torch.minimum(target, distribution(logits, decoding.temperature)).sum(-1)
        for decoding, target in zip(served, targets, strict=True)
    ]
    return torch.stack(found)


def name_served_sums(served: Sequence[Decoding], sums: Tensor) -> dict[str, Tensor]:
    """Return the metric sums of an evaluation by name, from Σ of the probabilities by each decoding, (d, T)."""
    return {f"{PREFIX}{decoding.suffix}_sums": each for decoding, each in zip(served, sums, strict=True)}
