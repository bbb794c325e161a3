"""Domino's loss: cross-entropies of the corrected and the base logits, in chunks of whole blocks.

With frozen head W, projection P, state z and bottleneck e of a label, its base logits are b = W·z, its corrected logits
f = b + P·e, and its loss is w·((1 - λ)·CE(f) + λ·CE(b)). Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, as_logits, score_labels
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import BlockChunk, TaughtBlocks, choose_weighting, is_argmax


def domino_cross_entropy(
    blocks: TaughtBlocks, bottlenecks: Tensor, head: Tensor, projection: Tensor, settings: LossSettings
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums: `acc_corrects`, `loss_sums` and `accept_len_sums` with the correction, `base_*` without. w is from the
    cross-entropies of the corrected logits, for both losses.

    Args:
        bottlenecks: (L, E), 0 where nothing is corrected.
        head: (V, H), frozen.
        projection: (V, E), trained.
    """
    weigh, share = choose_weighting(settings.options), _find_base_share(settings)

    def formula(chunk: BlockChunk, states: Tensor, bottlenecks: Tensor, projection: Tensor) -> LossSums:
        base = F.linear(states, head)  # (l, V)
        ce, hits = score_labels(as_logits(base.addmm(bottlenecks, projection.T)), chunk.labels)  # (l,) each
        if share > 0:
            base_ce, base_hits = score_labels(as_logits(base), chunk.labels)
            cost = (1 - share) * ce + share * base_ce
        else:
            cost, base_hits = ce, is_argmax(base, chunk.labels)
        sums = {
            "acc_corrects": chunk.sum(hits),
            "loss_sums": chunk.sum(ce),
            "base_acc_corrects": chunk.sum(base_hits),
            "accept_len_sums": chunk.sum_prefixes(hits),
            "base_accept_len_sums": chunk.sum_prefixes(base_hits),
        }
        return LossSums(torch.dot(chunk.label_weights(weigh, ce), cost), sums)

    return blocks.sum_chunks(formula, [blocks.proposing, bottlenecks], settings, [projection])


def _find_base_share(settings: LossSettings) -> float:
    """Return λ; 0 in evaluations."""
    ctx = settings.ctx
    return settings.options.compute_lambda_base(ctx.global_step, ctx.total_steps) if ctx.training else 0.0
