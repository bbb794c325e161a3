"""LiLiCorr, as its independent reader has it."""

from __future__ import annotations

import torch
from block_reference import BlockSums, expect_blocks, weigh
from reference_readers import dflash_reader
from strategy_cases import StrategyCases

from draftworks.drafts.strategy import DraftStrategy
from draftworks.strategies.dflash2.reader import convolve
from draftworks.strategies.lilicorr.reader import LatticeSettings, LiLiCorrReader

CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 4}


def read(strategy: DraftStrategy) -> LiLiCorrReader:
    backbone, options = dflash_reader(strategy), strategy.options
    if options.conv_kernel_size is not None:
        backbone = convolve(backbone, options.conv_kernel_size, options.conv_group_size)
    settings = LatticeSettings(
        candidates=options.candidate_topk,
        heads=options.lattice_heads,
        layers=options.lattice_layers,
        logit_scale=options.logit_scale,
        vector_eps=options.vector_eps,
    )
    return LiLiCorrReader(backbone, settings)


def add_block(total: BlockSums, reader: LiLiCorrReader, options, ctx) -> None:
    block, head = total.block, reader.backbone.head
    logits, base = reader.logits(*block.asked), reader.backbone.logits(*block.asked)
    ce, label_at = (
        block.cross_entropies(base),
        torch.arange(len(block.labels)),
    )
    total.loss = total.loss + (ce * weigh(options, ce, block.label_mask)).sum()
    found = logits[label_at, block.labels].isfinite()
    # A label that does not count ends no chain of those before it.
    reachable = (found | ~block.label_mask).cumprod(0).bool() & found
    right, base_right = reachable & (logits.argmax(-1) == block.labels), base.argmax(-1) == block.labels
    total.count(loss_sums=ce, base_acc_corrects=base_right, in_lattice_sums=found)
    if options.loss == "token_mean":
        total.count(acc_corrects=right)
    total.measure(accept_len=right, base_accept_len=base_right, lattice_len=found)
    if not block.label_mask.all():
        return
    for place in reachable.nonzero().flatten().tolist():
        label, scores = block.labels[place], logits[place]
        candidates = scores.isfinite().nonzero().flatten()
        others, shares = candidates[candidates != label], scores[candidates].softmax(-1)
        teacher = head @ block.last[place]
        gaps = (teacher[label] - teacher[candidates]).clamp_min(0)
        total.loss = total.loss - options.ce_weight * shares[candidates == label].log().sum()
        total.loss = total.loss + options.penalty_weight * (shares * gaps.detach()).sum()
        if len(others):
            short = (options.margin - (scores[label] - scores[others].max())).clamp_min(0)
            total.loss = total.loss + options.margin_weight * short


CASES = StrategyCases(
    # Of 40 tokens, so that random labels are mostly candidates.
    options={"candidate_topk": 32, "lattice_size": 8, "lattice_heads": 2, "factor_dim": 6},
    learning={"lattice_size": 32, "lattice_heads": 4},
    read=read,
    expect=expect_blocks(add_block, read),
    objectives=({}, {"margin_weight": 0.3}),
    variants=(
        {"gamma": 2.0, "ce_weight": 0.125, "margin_weight": 0.125},
        {"weighting": "dpace", "margin_weight": 0.7, "margin": 0.5, "penalty_weight": 0.0, "loss": "specforge"},
        {"objective_chunk_blocks": 1, "sliding_window": 3, "lattice_size": None, "candidate_topk": 8},
        {"candidate_topk": 1, "lattice_layers": 1},
        {"conv_kernel_size": 3, "conv_group_size": 4, "sliding_window": 4, "sliding_layers": [1]},
    ),
    packed=(
        {"candidate_topk": 16, "margin_weight": 0.3},
        {"candidate_topk": 8, "factor_dim": None, **CONVOLVED},
    ),
    structural=({"candidate_topk": 16}, {"logit_scale": 4.0}, {"vector_eps": 1e-3}),
    refused=(
        ({"lattice_size": 9}, "lattice_heads 2 do not divide the width 9 .* set lattice_size or lattice_heads"),
        (
            {"conv_kernel_size": 2, "conv_group_size": 5},
            "lilicorr: conv_group_size 5 does not divide the target's hidden_size",
        ),
        ({"ce_weight": 0, "penalty_weight": 0}, "the reranker would stay random"),
        ({"vector_eps": 0.5}, "vector_eps"),
        ({"candidate_topk": 0}, "candidate_topk"),
        ({"conv_kernel_size": 2}, "set both, or none"),
        ({"conv_kernel_size": 7, "conv_group_size": 4}, "conv_kernel_size 7 is more than block_size"),
    ),
    fixed={"default": {"margin_weight": 0.3}},
    exported={"candidate_topk": 4, "lattice_size": None, "factor_dim": None},
    exports={
        "sglang_lilicorr": (
            {"lattice_size": 6, "factor_dim": 5, "lattice_layers": 1, "candidate_topk": 8},
            {"sliding_window": 3, "block_size": 7, "margin_weight": 0.125, "logit_scale": 3.0},
            {"conv_kernel_size": 3, "conv_group_size": 4},
        )
    },
)
