"""DSpark's loss: cross-entropy, total variation and confidence error of labels, in chunks of whole blocks.

With frozen head W, projection P, state z and narrow Markov features n of a label, its logits are W·z + P·n, p is their
softmax, and its teacher is q = softmax(W·last) at the position before the label, where both divide their logits by the
teacher's temperature T first. The label costs

    w·(ce_weight·CE + tv_weight·T²·‖q - p‖₁ + confidence_weight·BCE(confidence, a)),   a = clamp(1 - ½‖q - p‖₁, 0, 1)

CE is that of the label, the token itself, at temperature 1. a = Σ_v min(q_v, p_v) is the probability that rejection sampling
at T accepts a token drawn from p; it has no gradient. Only labels that count get logits. Shapes as in draftworks.strategies.dflash.loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.logit_losses import LossSums, as_logits
from draftworks.drafts.objectives import LossSettings
from draftworks.strategies.dflash.loss import BlockChunk, TaughtBlocks, choose_weighting, is_argmax
from draftworks.strategies.dflash.teacher import JUDGED, Teacher, judge_labels, sum_judged


def dspark_losses(
    blocks: TaughtBlocks,
    narrow: Tensor,
    confidences: Tensor | None,
    head: Tensor,
    projection: Tensor,
    settings: LossSettings,
) -> LossSums:
    """Return the loss and the metric sums of the labels that count.

    Sums, beside those of `sum_judged` and `acc_corrects`: `loss_sums`, what labels cost before w; `accept_len_sums`;
    `confidence_error_sums`, of |σ(confidence) - a|, with a confidence head.

    Args:
        blocks: in a block, the first labels count.
        narrow: (L, r), what the Markov head adds before its projection; r is 0 without a Markov head.
        confidences: (L,) logits; None without a confidence head.
        head: (V, H), frozen, of draft and teacher.
        projection: (V, r), trained.
    """
    assert blocks.last is not None, "the strategy reads the target's last hidden states"
    teacher, options, weigh = Teacher(blocks.last, head), settings.options, choose_weighting(settings.options)

    def make_formula(settings: LossSettings) -> Callable[..., LossSums]:
        distance_weight = 2 * options.tv_weight * settings.loss_factor  # of ½‖q - p‖₁

        def formula(
            chunk: BlockChunk,
            states: Tensor,
            narrow: Tensor,
            confidences: Tensor | None,
            positions: Tensor,
            projection: Tensor,
        ) -> LossSums:
            logits = as_logits(F.linear(states, head).addmm(narrow, projection.T))  # (l, V)
            hits = is_argmax(logits, chunk.labels)
            served = teacher.measure_acceptance(positions, logits, settings.served)
            judged = judge_labels(logits, chunk.labels, teacher.teach(positions, settings.temperature), settings)
            a = judged.acceptance
            cost, errors = options.ce_weight * judged.ce + distance_weight * judged.distance, {}
            if confidences is not None:
                confidences = confidences.to(a.dtype)
                misjudged = F.binary_cross_entropy_with_logits(confidences, a, reduction="none")
                cost = cost + options.confidence_weight * misjudged
                errors = {"confidence_error_sums": chunk.sum((confidences.sigmoid() - a).abs())}
            sums = {
                "acc_corrects": chunk.sum(hits),
                "loss_sums": chunk.sum(cost),
                "accept_len_sums": chunk.sum_prefixes(hits),
                **errors,
                **sum_judged(chunk, a, served, settings),
            }
            return LossSums(torch.dot(chunk.label_weights(weigh, judged.ce), cost), sums)

        return formula

    inputs = [blocks.proposing, narrow, confidences, blocks.positions[blocks.label_mask]]
    return settings.measure(lambda each: blocks.sum_chunks(make_formula(each), inputs, each, [projection]), JUDGED)
