"""P-EAGLE, as its independent reader has it."""

from __future__ import annotations

import torch
from draft_toys import VOCAB
from peagle_reference import peagle_reader, peagle_sums
from strategy_cases import NAMES, SIZES, Sample, StrategyCases, Sums, side_by_side

from draftworks.drafts.strategy import DraftStrategy, StepContext


def expect(strategy: DraftStrategy, samples: list[Sample], ctx: StepContext) -> Sums:
    kept = strategy.select_chains(strategy.collate(samples, NAMES[: len(samples)]), ctx)
    found = [peagle_sums(strategy, one, side_by_side(strategy, one), kept[:, row]) for row, one in enumerate(samples)]
    corrects = torch.tensor([one.corrects for one in found], dtype=torch.float64).sum(0)
    by_depth = {"acc_corrects": corrects, "acc_denoms": kept.sum(dim=(1, 2), dtype=torch.float64)}
    return Sums(sum(one.loss for one in found), by_depth)


CASES = StrategyCases(
    options={"num_depths": 3, "num_layers": 2},
    read=peagle_reader,
    expect=expect,
    objectives=({}, {"train_embeddings": False}),
    variants=(
        {"down_sample_ratio": 1.0},
        {"num_depths": 1, "num_layers": 1},
        {"num_layers": 1, "down_sample_ratio": 0.5, "down_sample_ratio_min": 0.0},
        {"fc_norm": True, "norm_before_residual": True, "num_layers": 3},
        {"train_embeddings": False, "mask_token_id": 5},
        {"attention": "eager", "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 12},
        {"attention": "sdpa", "num_depths": 6},
        {"sliding_window": 4},
        {"sliding_window": 5, "attention": "eager", "num_layers": 3},
    ),
    packed=(
        {},
        {"num_layers": 1, "sliding_window": 8},
        {"num_layers": 1, "attention": "eager", "down_sample_ratio": 0.5, "train_embeddings": False},
    ),
    structural=({"fc_norm": True}, {"num_layers": 1}, {"train_embeddings": False}),
    fixed={
        "default": {"num_depths": 4},
        "fc_norm": {"num_depths": 4, "fc_norm": True, "norm_before_residual": True},
    },
    exports={
        "speculators_peagle": (
            {"fc_norm": True, "train_embeddings": False},
            {"norm_before_residual": True, "num_layers": 1, "layer_ids": [0, 1, 3, 6]},
            {**SIZES, "draft_vocab_size": VOCAB, "mask_token_id": 5},
            {"num_depths": 1, "num_layers": 3},
        )
    },
)
