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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, as_logits, find_largest, log_probs_at
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import BlockChunk, TaughtBlocks, choose_weighting


def dflash2_cross_entropies(
    blocks: TaughtBlocks, contexts: Tensor, head: Tensor, successors: Tensor, settings: LossSettings
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums: `loss_sums` and `selector_loss_sums`, of CE(u) + alpha·CE(s) and of CE(s), before w; `acc_corrects`, labels that the
    selector chooses; `recall_sums`, labels among the candidates; `accept_len_sums` and `base_accept_len_sums`, total length of
    the blocks' prefixes that the selector, and u, get right.

    Args:
        contexts: (L, r), the selector's factors of the token before and of the state, multiplied.
        head: (V, H), frozen.
        successors: (V, r), trained.
    """
    options, weigh = settings.options, choose_weighting(settings.options)
    alpha = options.selector_loss_alpha

    def formula(chunk: BlockChunk, states: Tensor, contexts: Tensor, successors: Tensor) -> LossSums:
        logits = as_logits(F.linear(states, head))  # (l, V)
        served = find_largest(logits, options.selector_top_k)
        taught = teach_candidates(served, chunk.labels)
        log_probs = log_probs_at(logits, torch.cat([chunk.labels[:, None], taught.ids], dim=1))
        ce = -log_probs[:, 0]  # (l,)
        # log p in place of u moves all scores of a label by the same, which changes neither their softmax nor their order.
        scores = score_candidates(log_probs[:, 1:], contexts, successors, taught.ids)
        selector_ce = F.cross_entropy(scores, taught.label_at, reduction="none")
        loss = torch.dot(chunk.label_weights(weigh, ce), ce)
        loss = loss + alpha * torch.dot(chunk.label_weights(weigh, selector_ce), selector_ce)
        hits = taught.is_served & (scores.detach().argmax(-1) == taught.label_at)  # (l,)
        sums = {
            "acc_corrects": chunk.sum(hits),
            "loss_sums": chunk.sum(ce + alpha * selector_ce),
            "selector_loss_sums": chunk.sum(selector_ce),
            "recall_sums": chunk.sum(taught.is_served),
            "accept_len_sums": chunk.sum_prefixes(hits),
            "base_accept_len_sums": chunk.sum_prefixes(served[:, 0] == chunk.labels),
        }
        return LossSums(loss, sums)

    return blocks.sum_chunks(formula, [blocks.proposing, contexts], settings, [successors])


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
