"""How likely a server accepts what a draft says at a label, token by token: rung 1 above temperature 0.

With p the target's distribution at the label, at the temperature and cut as the server cuts it, and q the draft's:

    greedy_draft    p at the argmax of q; with a reduced vocabulary p is still over all the target's tokens
    rejection       Σ_v min(p_v, q_v), q at the temperature and uncut

The expectation over what the draft proposes of `stands` in draftworks.drafts.sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftworks.config.decoding import Decoding
from draftworks.drafts.logit_losses import find_argmax
from draftworks.drafts.sampling import distribution, find_target_distribution

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
