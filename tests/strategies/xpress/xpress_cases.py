"""XPress, as its independent reader has it."""

from __future__ import annotations

import torch
from block_reference import BlockSums, expect_blocks, weigh
from reference_readers import dflash_reader
from strategy_cases import SIZES, StrategyCases

from draftworks.drafts.strategy import DraftStrategy
from draftworks.strategies.xpress.reader import XPressReader


def read(strategy: DraftStrategy) -> XPressReader:
    return XPressReader(dflash_reader(strategy), strategy.options.jacobi_passes, {})


def add_block(total: BlockSums, reader: XPressReader, options, ctx) -> None:
    block, known = total.block, int(total.block.next_tokens[-1])
    rows, base = reader.backbone.rows(block.features, block.next_tokens), reader.backbone.logits(*block.asked)
    refined, played, tokens = reader.refine(rows, known, block.labels), [], base.argmax(-1)
    for _ in range(options.consistency_passes):
        played.append(reader.refine(rows, known, tokens))
        tokens = played[-1].argmax(-1)
    shares = [1.0, options.base_weight, *[options.consistency_weight / max(1, len(played))] * len(played)]
    teacher = block.teach(reader.backbone.head)
    for logits, share in zip((refined, base, *played), shares, strict=True):
        ce, accepted = block.cross_entropies(logits), torch.minimum(logits.softmax(-1), teacher).sum(-1)
        cost = options.ce_weight * ce + options.tv_weight * (1 - accepted)
        total.loss = total.loss + share * (cost * weigh(options, ce, block.label_mask)).sum()
        if logits is refined:
            total.count(loss_sums=cost, acceptance_sums=accepted)
            total.expect(tau=accepted)
    right, base_right = (logits.argmax(-1) == block.labels for logits in (refined, base))
    total.count(acc_corrects=right)
    total.measure(accept_len=right, base_accept_len=base_right)


CASES = StrategyCases(
    options={"refiner_rank": 5},
    learning={"refiner_rank": 24, "jacobi_passes": 2},
    read=read,
    expect=expect_blocks(add_block, read, contiguous=True),
    variants=(
        {"gamma": 2.0, "ce_weight": 1.0, "consistency_passes": 1, "objective_chunk_blocks": 2},
        {"weighting": "dpace", "base_weight": 0.0, "sliding_window": 3},
        {"consistency_weight": 0.0, "num_anchors": 12, "loss": "specforge"},
    ),
    structural=({"jacobi_passes": 2}, {"refiner_rank": 4}, {"mlp_ratio": 3}),
    refused=(
        ({"ce_weight": 0, "tv_weight": 0}, "ce_weight"),
        ({"jacobi_passes": 0}, "jacobi_passes"),
        ({"refiner_rank": 0}, "refiner_rank"),
    ),
    exports=dict.fromkeys(
        ("speculators_xpress", "vllm_xpress"), ({"mlp_ratio": 3, "jacobi_passes": 2, **SIZES, "mask_token_id": 5},)
    ),
)
