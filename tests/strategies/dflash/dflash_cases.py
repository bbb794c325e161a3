"""DFlash, as its independent reader has it."""

from __future__ import annotations

from block_reference import BlockSums, expect_blocks, weigh
from reference_readers import dflash_reader
from strategy_cases import SIZES, StrategyCases

from draftworks.export.readers.reader import ExportReader


def add_block(total: BlockSums, reader: ExportReader, options, ctx) -> None:
    logits = reader.logits(*total.block.asked)
    ce = total.block.cross_entropies(logits)
    total.loss = total.loss + (ce * weigh(options, ce, total.block.label_mask)).sum()
    total.count(loss_sums=ce, acc_corrects=logits.argmax(-1) == total.block.labels)


EXPORTED = ({"layer_ids": [1, 4], "num_taps": 2}, {**SIZES, "mask_token_id": 5})

CASES = StrategyCases(
    options={},
    learning={"sliding_window": 20, "sliding_layers": [0]},
    read=dflash_reader,
    expect=expect_blocks(add_block, dflash_reader),
    objectives=(
        {},
        {"gamma": 2.0},
        {"weighting": "dpace"},
        {"weighting": "dpace_cumulative_confidence", "loss": "specforge"},
        {"weighting": "dpace_continuation_value", "dpace_alpha": 0.2},
    ),
    variants=(
        {"loss": "specforge"},
        {"sliding_window": 3},
        {"sliding_window": 2, "sliding_layers": [1], "attention": "eager"},
        {"sliding_window": 3, "sliding_window_kind": "anchor"},
        {"sliding_window": 3, "sliding_window_kind": "anchor_both_ways", "sliding_layers": [1]},
        {"objective_chunk_blocks": 1},
        {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 12},
    ),
    packed=(
        {"gamma": 2.0},
        {"loss": "specforge"},
        {"weighting": "dpace"},
        {"loss": "specforge", "weighting": "dpace", "attention": "eager"},
        {"sliding_window": 3, "sliding_layers": [1]},
    ),
    structural=({"block_size": 3}, {"sliding_window": 3}),
    refused=(
        ({"num_heads": 3}, "num_heads 3 is not a multiple"),
        ({"sliding_layers": [0]}, "sliding_layers"),
        ({"sliding_window": 4, "sliding_layers": [7]}, "sliding_layers"),
        ({"sliding_window_kind": "anchor"}, "sliding_window_kind"),
        ({"weighting": "dpace", "gamma": 1}, "weighting"),
    ),
    fixed={"default": {"gamma": 2.0}, "dpace, window": {"weighting": "dpace", "sliding_window": 3}},
    exports={
        "zlab_dflash": (*EXPORTED, {"sliding_window": 3}, {"sliding_window": 3, "sliding_layers": [1]}),
        "speculators_dflash": EXPORTED,
    },
)
