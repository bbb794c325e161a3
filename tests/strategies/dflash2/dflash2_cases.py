"""DFlash 2, as its independent reader has it."""

from __future__ import annotations

import torch
from block_reference import BlockSums, expect_blocks, weigh
from draft_toys import HIDDEN, VOCAB
from reference_readers import dflash_reader
from strategy_cases import SIZES, StrategyCases

from draftworks.drafts.strategy import DraftStrategy
from draftworks.strategies.dflash2.reader import DFlash2Reader, convolve, select


def read(strategy: DraftStrategy) -> DFlash2Reader:
    options = strategy.options
    rows = convolve(dflash_reader(strategy), options.conv_kernel_size, options.conv_group_size)
    return select(rows, options.selector_top_k)


def add_block(total: BlockSums, reader: DFlash2Reader, options, ctx) -> None:
    block, alpha = total.block, options.selector_loss_alpha
    unary, scores = reader.backbone.logits(*block.asked), reader.scores(*block.asked)
    ce, chosen, listed, first = block.cross_entropies(unary), [], [], []
    for place, label in enumerate(block.labels.tolist()):
        likeliest = unary[place].argsort(descending=True)[: options.selector_top_k].tolist()
        taught = likeliest if label in likeliest else [*likeliest[:-1], label]
        chosen.append(scores[place, taught].logsumexp(-1) - scores[place, label])
        listed.append(label in likeliest)
        first.append(likeliest[0] == label)
    selector_ce, right = torch.stack(chosen), reader.logits(*block.asked).argmax(-1) == block.labels
    for share, part in ((1.0, ce), (alpha, selector_ce)):
        total.loss = total.loss + share * (part * weigh(options, part, block.label_mask)).sum()
    total.count(acc_corrects=right, recall_sums=torch.tensor(listed))
    total.count(selector_loss_sums=selector_ce, loss_sums=ce + alpha * selector_ce)
    total.measure(accept_len=right, base_accept_len=torch.tensor(first))


EXPORTED = {**SIZES, "conv_kernel_size": 3, "conv_group_size": 8, "selector_top_k": 7}

CASES = StrategyCases(
    options={"conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6},
    learning={"selector_rank": 24, "selector_top_k": 8},
    read=read,
    expect=expect_blocks(add_block, read),
    objectives=({}, {"weighting": "dpace"}),
    variants=(
        {"gamma": 2.0, "conv_kernel_size": 3},
        {"loss": "specforge", "selector_loss_alpha": 0.3},
        {"objective_chunk_blocks": 1, "sliding_window": 3, "selector_top_k": VOCAB},
    ),
    structural=({"selector_top_k": 7}, {"conv_kernel_size": 3}, {"conv_group_size": 8}, {"selector_rank": 4}),
    refused=(
        ({"conv_group_size": 5}, f"conv_group_size 5 does not divide the target's hidden_size {HIDDEN}"),
        ({"selector_top_k": VOCAB + 1}, f"selector_top_k {VOCAB + 1} is more than the {VOCAB} tokens"),
        ({"conv_kernel_size": 5}, "conv_kernel_size 5 is more than block_size 4"),
    ),
    fixed={"default": {"gamma": 2.0, "selector_loss_alpha": 0.7}},
    exports={
        "zlab_dflash2": (EXPORTED, {"sliding_window": 3, "block_size": 7}),
        "speculators_dflash2": (EXPORTED,),
    },
)
