"""Domino trains, at every step of its schedule, and proposes what the independent reader of its exports computes."""

from __future__ import annotations

from functools import partial

import pytest
import strategy_cases
import torch
from dflash_toys import OPTIONS as BLOCKS
from dflash_toys import SAMPLES, sample
from strategy_cases import NAMES

from draftworks.drafts.strategy import StepContext
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.options import DominoOptions
from draftworks.strategies.domino.strategy import DominoStrategy

make = partial(strategy_cases.make, "domino")


def test_the_share_of_the_base_loss_falls_to_nothing_and_needs_a_horizon():
    options = DominoOptions()
    assert [options.compute_lambda_base(step, 11) for step in (0, 1, 4, 5, 10)] == [
        1.0,
        0.8,
        pytest.approx(0.2),
        0.0,
        0.0,
    ]
    assert options.compute_lambda_base(3, 0) == 0.0
    at_once = DominoOptions(lambda_base_decay_ratio=0.0, lambda_base_start=0.3)
    assert [at_once.compute_lambda_base(step, 11) for step in (0, 1)] == [0.3, 0.0]


def test_an_evaluation_looks_at_what_is_served_whatever_the_step():
    strategy = make(num_anchors=2)
    batch = strategy.collate(SAMPLES, NAMES)
    with torch.no_grad():
        outputs = [strategy.forward_loss(batch, StepContext(step, 20, training=False)) for step in (0, 5, 20)]
    assert outputs[0].loss_sum == outputs[1].loss_sum == outputs[2].loss_sum
    torch.testing.assert_close(outputs[0].loss_sum, outputs[0].metric_sums["loss_sums"].sum())


def test_an_untrained_draft_proposes_what_its_backbone_does(parts):
    options = DominoOptions(**BLOCKS, emb_dim=6, gru_hidden_dim=5, shift_label=False)
    strategy = DominoStrategy(options, parts, None, seed=3)
    backbone = DFlashStrategy(DFlashOptions(**BLOCKS), parts, None, seed=3)
    batch = strategy.collate([sample([1] * 9, 2, torch.float32)], ["a"])
    rows = torch.ones(1, 9, dtype=torch.bool)
    assert torch.equal(strategy.propose(batch, rows, 3), backbone.propose(batch, rows, 3))
