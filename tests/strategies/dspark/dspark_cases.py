"""DSpark, as its independent reader has it."""

from __future__ import annotations

from block_reference import BlockSums, expect_blocks, weigh
from reference_readers import dflash_reader
from strategy_cases import SIZES, StrategyCases

from draftworks.drafts.strategy import DraftStrategy
from draftworks.strategies.dspark.reader import DSparkReader

GATED = {"markov_head_type": "gated"}
RNN = {"markov_head_type": "rnn", "confidence_with_markov": False}
NONE = {"markov_rank": 0, "confidence_head": False}


def read(strategy: DraftStrategy) -> DSparkReader:
    options = strategy.options
    kind = options.markov_head_type if options.markov_rank else None
    return DSparkReader(dflash_reader(strategy, first_row=0), kind, options.confidence_with_markov)


def add_block(total: BlockSums, reader: DSparkReader, options, ctx) -> None:
    block = total.block
    logits = reader.logits(*block.asked)
    ce, right = block.cross_entropies(logits), logits.argmax(-1) == block.labels
    distance = (block.teach(reader.backbone.head) - logits.softmax(-1)).abs().sum(-1)
    accepted = (1 - distance.detach() / 2).clamp(0, 1)
    cost = options.ce_weight * ce + options.tv_weight * distance
    if options.confidence_head:
        sure = reader.confidence(*block.asked).sigmoid()
        cost = cost - options.confidence_weight * (accepted * sure.log() + (1 - accepted) * (1 - sure).log())
        total.count(confidence_error_sums=(sure - accepted).abs())
    total.loss = total.loss + (cost * weigh(options, ce, block.label_mask)).sum()
    total.count(loss_sums=cost, acceptance_sums=accepted, acc_corrects=right)
    total.measure(accept_len=right)
    total.expect(tau=accepted)


EXPORTED = (
    {**GATED, "confidence_with_markov": False, **SIZES, "mask_token_id": 5},
    {"markov_head_type": "rnn", "confidence_head": False, "layer_ids": [1, 4], "num_taps": 2},
)

CASES = StrategyCases(
    options={"markov_rank": 5},
    learning={"block_size": 4, "markov_rank": 24, "markov_head_type": "rnn"},
    read=read,
    expect=expect_blocks(add_block, read, contiguous=True),
    objectives=({}, {**GATED, "weighting": "dpace"}, {**RNN, "gamma": 2.0}),
    variants=(
        {"gamma": 2.0, "ce_weight": 1.0, "tv_weight": 0.0, "confidence_weight": 0.5},
        {"weighting": "dpace", "ce_weight": 0.0, "loss": "specforge"},
        {"objective_chunk_blocks": 2, "sliding_window": 3},
        GATED,
        RNN,
        NONE,
    ),
    packed=({"gamma": 2.0}, {"markov_head_type": "rnn", "weighting": "dpace"}),
    structural=({"markov_rank": 7}, GATED, {"confidence_head": False}, {"confidence_with_markov": False}),
    refused=(
        ({"markov_rank": 0}, "markov_rank 0 leaves no Markov embedding .* set confidence_with_markov: false"),
        ({"markov_rank": 0, "markov_head_type": "rnn"}, "markov_head_type rnn, but markov_rank 0"),
        ({"ce_weight": 0, "tv_weight": 0}, "ce_weight and tv_weight are both 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"confidence_weight": -1}, "confidence_weight"),
        ({"block_size": 1}, "block_size"),
    ),
    fixed={"default": {}, "rnn": {"markov_head_type": "rnn"}},
    exported={"markov_rank": 6},
    exports={
        "zlab_dspark": (*EXPORTED, {"sliding_window": 3, "block_size": 7}),
        "speculators_dspark": (*EXPORTED, {"markov_rank": 0, "confidence_with_markov": False}),
    },
)
