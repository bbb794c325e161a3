"""XPress's loss: that of a pass on the true tokens, of passes on the draft's own, and of the backbone, in chunks of blocks.

With frozen head W, readout R, state h and refiner features n of a label, the logits of a pass are W·h + R·n, those of the
backbone W·h. p is the softmax of such logits, q = softmax(W·last) at the position before the label is its teacher, both of
logits divided by the teacher's temperature T, and a label costs

    c = ce_weight·CE + tv_weight·T²·½‖q - p‖₁

CE is that of the label, the token itself, at temperature 1. (speculators 0.9.0 takes the argmax of q, and the token with `ce_from_data`.) The
loss adds up, over the labels,

    w·c(true tokens) + consistency_weight·mean_j w_j·c(pass j on its own tokens) + base_weight·w_b·c(backbone)

where each weight w comes from the cross-entropies of its own logits. Only labels that count get logits. Shapes as in
draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, as_logits
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import BlockChunk, TaughtBlocks, choose_weighting, is_argmax
from draftworks.strategies.dflash.teacher import JUDGED, JudgedLabels, Teacher, judge_labels, sum_judged


def xpress_losses(
    blocks: TaughtBlocks, narrow: Tensor, head: Tensor, projection: Tensor, settings: LossSettings
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums, all but the last of the pass on the true tokens, beside those of `sum_judged` and `acc_corrects`: `loss_sums`, what
    labels cost before w; `accept_len_sums`; `base_accept_len_sums`, without the refiner.

    Args:
        narrow: (L, 1 + rounds, r), the refiner's features on the true tokens and on those of each round.
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
    """
    assert blocks.last is not None, "the strategy reads the target's last hidden states"
    teacher, options, weigh = Teacher(blocks.last, head), settings.options, choose_weighting(settings.options)

    def make_formula(settings: LossSettings) -> Callable[..., LossSums]:
        def cost_of(judged: JudgedLabels) -> Tensor:
            return options.ce_weight * judged.ce + options.tv_weight * settings.loss_factor * judged.distance

        def weighted(chunk: BlockChunk, judged: JudgedLabels) -> Tensor:
            """Return the loss of each set of logits, (P,)."""
            weights = [chunk.label_weights(weigh, ce) for ce in judged.ce]
            return (torch.stack(weights) * cost_of(judged)).sum(-1)

        def formula(
            chunk: BlockChunk, states: Tensor, narrow: Tensor, positions: Tensor, projection: Tensor
        ) -> LossSums:
            base = F.linear(states, head)[None]  # (1, l, V)
            logits = as_logits(F.linear(narrow.transpose(0, 1).contiguous(), projection).add_(base))  # (P, l, V)
            base = as_logits(base)
            hits, base_hits = (is_argmax(each[0], chunk.labels) for each in (logits, base))  # (l,)
            served = teacher.measure_acceptance(positions, logits[0], settings.served)
            soft = teacher.teach(positions, settings.temperature)
            judged = judge_labels(logits, chunk.labels, soft, settings)
            loss, *rounds = weighted(chunk, judged).unbind()
            if rounds:
                loss = loss + options.consistency_weight * torch.stack(rounds).mean()
            if options.base_weight > 0:
                of_base = weighted(chunk, judge_labels(base, chunk.labels, soft, settings))
                loss = loss + options.base_weight * of_base.sum()
            sums = {
                "acc_corrects": chunk.sum(hits),
                "loss_sums": chunk.sum(cost_of(judged)[0]),
                "accept_len_sums": chunk.sum_prefixes(hits),
                "base_accept_len_sums": chunk.sum_prefixes(base_hits),
                **sum_judged(chunk, judged.acceptance[0], served, settings),
            }
            return LossSums(loss, sums)

        return formula

    inputs, passes = [blocks.proposing, narrow, blocks.positions[blocks.label_mask]], 1 + narrow.shape[1]
    return settings.measure(
        lambda each: blocks.sum_chunks(make_formula(each), inputs, each, [projection], passes), JUDGED
    )
