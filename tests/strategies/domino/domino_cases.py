"""Domino, as its independent reader has it."""

from __future__ import annotations

from block_reference import BlockSums, expect_blocks, weigh
from reference_readers import dflash_reader
from strategy_cases import SIZES, StrategyCases

from draftworks.drafts.strategy import DraftStrategy
from draftworks.strategies.domino.reader import DominoReader


def read(strategy: DraftStrategy) -> DominoReader:
    options = strategy.options
    return DominoReader(dflash_reader(strategy, 0 if options.shift_label else 1), options.pure_draft_prefix_len)


def add_block(total: BlockSums, reader: DominoReader, options, ctx) -> None:
    block = total.block
    corrected, base = reader.logits(*block.asked), reader.backbone.logits(*block.asked)
    ce, share = block.cross_entropies(corrected), 0.0
    if ctx.training:  # falls from its start to 0 over a part of the training
        over = max(1, int(ctx.total_steps * options.lambda_base_decay_ratio))
        share = options.lambda_base_start * max(0.0, 1 - ctx.global_step / over)
    cost = (1 - share) * ce + share * block.cross_entropies(base)
    total.loss = total.loss + (cost * weigh(options, ce, block.label_mask)).sum()
    right, base_right = (logits.argmax(-1) == block.labels for logits in (corrected, base))
    total.count(loss_sums=ce, acc_corrects=right, base_acc_corrects=base_right)
    total.measure(accept_len=right, base_accept_len=base_right)


CASES = StrategyCases(
    options={"emb_dim": 6, "gru_hidden_dim": 5},
    learning={"emb_dim": 24, "gru_hidden_dim": 32},
    read=read,
    expect=expect_blocks(add_block, read),
    objectives=({}, {"weighting": "dpace", "pure_draft_prefix_len": 2}, {"lambda_base_start": 0.0}),
    variants=(
        {"shift_label": False},
        {"gamma": 2.0, "lambda_base_start": 0.6, "lambda_base_decay_ratio": 1.0},
        {"loss": "specforge", "pure_draft_prefix_len": 0, "shift_label": False},
        {"lambda_base_decay_ratio": 0.2},
        {"objective_chunk_blocks": 1, "sliding_window": 3},
    ),
    structural=({"shift_label": False}, {"pure_draft_prefix_len": 2}, {"gru_hidden_dim": 7}),
    refused=(
        ({"pure_draft_prefix_len": 4}, r"leaves none of the 4 proposals of a block to correct: expected 0\.\.3"),
        ({"pure_draft_prefix_len": 3, "shift_label": False}, r"none of the 3 proposals"),
        ({"lambda_base_start": 1.5}, "lambda_base_start"),
        ({"gru_hidden_dim": 0}, "gru_hidden_dim"),
    ),
    exports={
        "zlab_domino": (
            {"shift_label": False},
            {"layer_ids": [1, 4], "num_taps": 2},
            {**SIZES, "mask_token_id": 5, "shift_label": False},
            {"sliding_window": 3, "block_size": 7},
        )
    },
)
