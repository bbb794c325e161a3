"""EAGLE-3, as its independent reader has it."""

from __future__ import annotations

import torch
from draft_toys import VOCAB
from eagle3_reference import eagle3_reader, reference
from strategy_cases import SIZES, Sample, StrategyCases, Sums

from draftworks.drafts.strategy import DraftStrategy, StepContext


def expect(strategy: DraftStrategy, samples: list[Sample], ctx: StepContext) -> Sums:
    found = reference(strategy, samples)
    counts = {"acc_corrects": found.corrects, "acc_denoms": found.denoms}
    # Batches are weighed by their positions when they are evaluated.
    positions = len(samples) * max(len(sample["input_ids"]) for sample in samples)
    weight = positions if strategy.options.loss == "specforge" and not ctx.training else 1
    return Sums(weight * found.loss, {name: torch.tensor(each, dtype=torch.float64) for name, each in counts.items()})


EXPORTED = (
    {"fc_norm": True},
    {"layer_ids": [1, 3, 4, 6]},
    {"draft_vocab_size": VOCAB},
    {**SIZES, "ttt_length": 1},
)

CASES = StrategyCases(
    options={"ttt_length": 4},
    read=eagle3_reader,
    expect=expect,
    objectives=({}, {"objective": "lk_alpha"}, {"objective": "lk_lambda"}),
    variants=(
        {"ttt_length": 1},
        {"loss": "specforge", "objective": "lk_alpha"},
        {"objective": "lk_lambda", "kl_scale": 0.7, "kl_decay": 2.0, "step_decay": 0.5},
    ),
    packed=(
        {},
        {"attention": "eager", "feedback": "post_norm", "fc_norm": True},
        {"attention": "sdpa", "objective": "lk_alpha"},
        {"objective": "lk_lambda", "kl_scale": 3.0, "norm_output": False},
        {"sliding_window": 3, "norm_before_fc": True, "norm_before_residual": True},
    ),
    refused=(({"num_heads": 8, "num_kv_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),),
    fixed={"default": {}, "specforge": {"loss": "specforge"}},
    exported={"ttt_length": 3},
    exports={
        "sglang_eagle3": EXPORTED,
        "speculators_eagle3": (
            *EXPORTED,
            {"feedback": "post_norm"},
            {"fc_norm": True, "feedback": "post_norm"},
            {"norm_before_fc": True, "sliding_window": 3},
            {"norm_before_residual": True, "norm_before_fc": True, "feedback": "post_norm"},
            {"layer_ids": [0, 3]},
        ),
    },
)
