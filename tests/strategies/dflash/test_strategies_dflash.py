"""DFlash trains and proposes what the independent reader of its exports computes, whatever the batch."""

from __future__ import annotations

from functools import partial

import strategy_cases
import torch
from dflash_toys import MASKS, gradients, sample

from draftworks.drafts.strategy import StepContext

make = partial(strategy_cases.make, "dflash")


def test_attention_back_ends_agree():
    for window in (None, 3):
        outputs = {}
        for backend in ("eager", "sdpa", "flex"):
            strategy = make(attention=backend, sliding_window=window, dtype=torch.float32)
            batch = strategy.collate([sample(mask, s, torch.float32) for s, mask in enumerate(MASKS)], ["a", "b", "c"])
            with torch.no_grad():
                outputs[backend] = strategy.forward_loss(batch, StepContext(training=False))
        for backend in ("sdpa", "flex"):
            torch.testing.assert_close(outputs[backend].loss_sum, outputs["eager"].loss_sum, rtol=1e-5, atol=1e-5)


def test_a_long_batch_goes_through_attention_in_groups_with_the_same_result():
    long = [sample([0] * 9 + [1] * 150, 11), sample([0] * 90 + [1] * 20, 12)]
    sums = {}
    for backend in ("eager", "sdpa"):
        strategy = make(attention=backend, num_anchors=70, sliding_window=9, sliding_layers=[0])
        output = strategy.forward_loss(strategy.collate(long, ["a", "b"]), StepContext(training=True))
        sums[backend] = [output.loss_sum, *gradients(strategy, output.loss_sum).values()]
    for ours, plain in zip(sums["sdpa"], sums["eager"]):
        torch.testing.assert_close(ours, plain)


def test_a_head_of_another_dtype_is_cast_once():
    model = make(torch.float32).model
    stored = model.own_target_head
    assert model.target_head is stored
    model.fc.bfloat16()
    cast = model.target_head
    assert cast.dtype == torch.bfloat16
    assert model.target_head is cast
    model.own_target_head = 2 * stored
    assert torch.equal(model.target_head, (2 * stored).bfloat16())
    model.fc.float()
    assert model.target_head is model.own_target_head
