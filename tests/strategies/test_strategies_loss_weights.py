"""What the losses of block drafts are divided by, in figures: a draft that says all tokens alike costs ln V a label, weighed or not."""

from __future__ import annotations

import math

import pytest
import torch
from draft_toys import HIDDEN, VOCAB, small_target

from draftworks.drafts.strategy import StepContext
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.options import DominoOptions
from draftworks.strategies.domino.strategy import DominoStrategy

MASK = [0, 1, 1, 1, 1, 0, 1, 1, 0]
"""Anchors at 1, 2, 3 and 6. Labels of a block of four: 2 3 4, 3 4, 4 and 7 up to the end of an answer; by SpecForge's rule the
anchor at 3 also has its third, at 6."""
BY_PLACE = {"token_mean": (4, 2, 1), "specforge": (4, 2, 2)}
SHAPE = {"block_size": 4, "num_layers": 1, "layer_ids": [2, 4, 5], "num_anchors": 100}
FADING = math.exp(-1 / 2)


def make(strategy: str, **options):
    if strategy == "dflash":
        made = DFlashStrategy(DFlashOptions(**SHAPE, **options), small_target(), None, seed=3)
        norm = made.model.norm
    else:
        given = {"shift_label": False, "emb_dim": 6, "gru_hidden_dim": 5, **options}
        made = DominoStrategy(DominoOptions(**SHAPE, **given), small_target(), None, seed=3)
        norm = made.model.backbone.norm
        torch.nn.init.zeros_(dict(made.model.named_parameters())["correction.embed_proj.2.weight"])
    torch.nn.init.zeros_(norm.weight)  # all logits are 0
    return made


def batch_of(strategy, copies: int = 1):
    generator = torch.Generator().manual_seed(2)
    sample = {
        "input_ids": torch.randint(VOCAB, (len(MASK),), generator=generator),
        "loss_mask": torch.tensor(MASK).bool(),
    }
    sample |= {name: torch.randn(len(MASK), HIDDEN, generator=generator) for name in strategy.feature_names}
    return strategy.collate([sample] * copies, [f"s{i}" for i in range(copies)])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gamma", [None, 2.0])
@pytest.mark.parametrize("loss", BY_PLACE)
@pytest.mark.parametrize("strategy", ["dflash", "domino"])
def test_the_sum_and_its_divisor_are_those_of_the_weighed_labels(strategy, loss, gamma, training):
    made = make(strategy, loss=loss, gamma=gamma)
    weights = (1.0, 1.0, 1.0) if gamma is None else (1.0, FADING, FADING**2)
    expected = sum(count * weight for count, weight in zip(BY_PLACE[loss], weights))
    with torch.set_grad_enabled(training):
        output = made.forward_loss(batch_of(made), StepContext(global_step=3, total_steps=10, training=True))
    assert float(output.loss_weight) == pytest.approx(expected, rel=1e-6)
    assert output.loss_sum.item() == pytest.approx(expected * math.log(VOCAB), rel=1e-5)
    assert output.metric_sums["acc_denoms"].tolist() == list(BY_PLACE[loss])


@pytest.mark.parametrize("copies", [1, 3])
def test_dpace_is_divided_by_samples_in_specforges_mode_and_by_labels_else(copies):
    reference, own = (make("dflash", loss=loss, weighting="dpace") for loss in ("specforge", "token_mean"))
    outputs = [made.forward_loss(batch_of(made, copies), StepContext(training=True)) for made in (reference, own)]
    assert [float(output.loss_weight) for output in outputs] == [copies, copies * sum(BY_PLACE["token_mean"])]
    # A label that is 1/V likely, smoothed by a half: c = (1 + 1/V)/2; a block of n labels weighs c^k + … + c^n at label k.
    c = (1 + 1 / VOCAB) / 2
    blocks = [sum(sum(c**i for i in range(k, n + 1)) for k in range(1, n + 1)) for n in (3, 2, 1, 1)]
    assert outputs[1].loss_sum.item() == pytest.approx(copies * sum(blocks) * math.log(VOCAB), rel=1e-5)
