"""DFlash 2's loss: cross-entropies of the backbone's logits and of the selector's scores, in chunks of whole blocks.

With frozen head W and normed state z of a label y, its logits are u = W·z, C are the k likeliest tokens of u, and s the
selector's scores of C after the true token before the label. The label costs

    w(CE(u))·CE(u) + alpha·w(CE(s))·CE(s)

Where y is not in C it takes the place of the least likely candidate, so that CE(s) is always defined; what is counted as
right and as accepted demands that it was there, because a server proposes nothing else. Gradients of CE(s) also reach z, by u
and by the selector's context, as in speculators 0.9.0 (`models/dflash2/metrics.py`). Only labels that count get logits.
Shapes as in draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import chunked_loss, find_largest, log_probs_at
from draftworks.strategies.dflash.loss import (
    BlockChunk,
    LabelWeighting,
    at_least_float32,
    split_into_chunks,
    sum_prefix_lengths,
)


@dataclass(frozen=True)
class DFlash2Objective:
    """How the losses of labels add up.

    Attributes:
        weigh: w, from the cross-entropies of one of both losses to its weights; constants for the gradient.
        alpha: weight of the selector's loss.
        top_k: k, number of candidates.
        chunk_blocks: blocks whose logits are held at a time.
    """

    weigh: LabelWeighting
    alpha: float
    top_k: int
    chunk_blocks: int


class DFlash2States(NamedTuple):
    """What the labels that count are predicted from, in order of block and place.

    Attributes:
        states: (L, H), normed.
        contexts: (L, r), the selector's factors of the token before and of the state, multiplied.
    """

    states: Tensor
    contexts: Tensor


class DFlash2Losses(NamedTuple):
    """`loss` is differentiable; the sums over blocks, float64, are not.

    Attributes:
        loss_sums, selector_loss_sums: (k,), by place, of CE(u) + alpha·CE(s) and of CE(s), before w.
        corrects: (k,), number of labels that the selector chooses.
        recalled: (k,), number of labels among the candidates.
        accepted, base_accepted: scalars, total length of the blocks' prefixes that the selector, and u, get right.
    """

    loss: Tensor
    loss_sums: Tensor
    selector_loss_sums: Tensor
    corrects: Tensor
    recalled: Tensor
    accepted: Tensor
    base_accepted: Tensor


def dflash2_cross_entropies(
    inputs: DFlash2States,
    head: Tensor,
    successors: Tensor,
    labels: Tensor,
    label_mask: Tensor,
    objective: DFlash2Objective,
) -> DFlash2Losses:
    """Return the loss and the metric sums of the labels that count.

    Args:
        head: (V, H), frozen.
        successors: (V, r), trained.
        labels: (N, k) int64.
        label_mask: (N, k) bool, on at L labels.
    """
    weigh, alpha = objective.weigh, objective.alpha

    def formula(chunk: BlockChunk, states: Tensor, contexts: Tensor, successors: Tensor) -> DFlash2Losses:
        logits = at_least_float32(F.linear(states, head))  # (l, V)
        served = find_largest(logits, objective.top_k)
        taught = teach_candidates(served, chunk.labels)
        log_probs = log_probs_at(logits, torch.cat([chunk.labels[:, None], taught.ids], dim=1))
        ce = -log_probs[:, 0]  # (l,)
        # log p in place of u moves all scores of a label by the same, which changes neither their softmax nor their order.
        scores = score_candidates(log_probs[:, 1:], contexts, successors, taught.ids)
        selector_ce = F.cross_entropy(scores, taught.label_at, reduction="none")
        loss = torch.dot(chunk.label_weights(weigh, ce), ce)
        loss = loss + alpha * torch.dot(chunk.label_weights(weigh, selector_ce), selector_ce)
        hits = chunk.scatter(taught.is_served & (scores.detach().argmax(-1) == taught.label_at))  # (n, k)
        base_hits = chunk.scatter(served[:, 0] == chunk.labels)
        return DFlash2Losses(
            loss=loss,
            loss_sums=chunk.scatter(ce + alpha * selector_ce).sum(0),
            selector_loss_sums=chunk.scatter(selector_ce).sum(0),
            corrects=hits.sum(0),
            recalled=chunk.scatter(taught.is_served).sum(0),
            accepted=sum_prefix_lengths(hits, chunk.label_mask),
            base_accepted=sum_prefix_lengths(base_hits, chunk.label_mask),
        )

    return chunked_loss(formula, split_into_chunks(labels, label_mask, objective.chunk_blocks), inputs, [successors])


class TaughtCandidates(NamedTuple):
    """Candidates (l, k) int64 that hold every label, where it is among them (l,), and whether it was before (l,) bool."""

    ids: Tensor
    label_at: Tensor
    is_served: Tensor


def teach_candidates(served: Tensor, labels: Tensor) -> TaughtCandidates:
    """Return the candidates of training: a label (l,) that is not among the served ones (l, k) replaces the last."""
    matches = served == labels[:, None]
    is_served = matches.any(-1)
    last = served.shape[1] - 1
    ids = torch.cat([served[:, :-1], torch.where(is_served, served[:, -1], labels)[:, None]], dim=1)
    return TaughtCandidates(ids, torch.where(is_served, matches.int().argmax(-1), last), is_served)


def score_candidates(unary: Tensor, contexts: Tensor, successors: Tensor, candidates: Tensor) -> Tensor:
    """Return the scores (n, k) of candidates (n, k) from their logits (n, k), contexts (n, r) and factors (V, r)."""
    chosen = F.embedding(candidates, successors).to(contexts.dtype)  # (n, k, r)
    return unary + (chosen @ contexts[..., None]).squeeze(-1).to(unary.dtype)
