"""The formulas count what torch does: its linear products to a few percent, its attention per pair of query and key."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from gpu_cases import (
    SHAPES,
    engine_strategies,
    made_up_draft,
    made_up_samples,
    made_up_target,
    names_of,
    select_options,
)
from gpu_flops import FORMULAS, Layer, Work, peak_flops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, mm_flop

from draftworks.drafts.strategy import StepContext

SHAPE, LENGTHS = SHAPES["tiny"], (40, 40)
ADDED_IN_PLACE = torch.ops.aten.addmm_
"""Which torch's counter does not know."""


class ProductCounter(TorchDispatchMode):
    """Sums torch's own counts by operator.

    torch's FlopCounterMode counts by module as well, with hooks that gradients of a chunk's loss do not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator is ADDED_IN_PLACE:
            self.found[operator] += mm_flop(*args[1:3], out_val=result)
        elif operator in flop_registry:
            self.found[operator] += flop_registry[operator](*args, **(kwargs or {}), out_val=result)
        return result


def counted_and_written_down(name: str):
    strategy = made_up_draft(name, SHAPE, made_up_target(SHAPE), attention="eager")
    samples = made_up_samples(strategy, SHAPE, LENGTHS)
    batch = strategy.collate(samples, names_of(samples))
    with ProductCounter() as counter:
        output = strategy.forward_loss(batch, StepContext(1, 4, training=True))
        output.loss_sum.backward()
    work = Work.of(samples, output.metric_sums["acc_denoms"].tolist())
    return counter.found, FORMULAS[name](SHAPE, select_options(name, SHAPE), work)


@pytest.mark.parametrize("name", engine_strategies())
def test_linear_products_are_those_that_torch_counts(name):
    found, expected = counted_and_written_down(name)
    linear = sum(found[operator] for operator in (torch.ops.aten.mm, torch.ops.aten.addmm, ADDED_IN_PLACE))
    assert linear == pytest.approx(expected.products, rel=0.01)


@pytest.mark.parametrize(("name", "dense"), [("eagle3", 3 * 2 * 40 * 40), ("dflash", 2 * 2 * 64 * (40 + 64))])
def test_attention_is_what_torch_counts_for_as_many_pairs(name, dense):
    """The written-out back end computes every pair, masked or not: `dense`, steps or layers times samples times pairs of each."""
    found, expected = counted_and_written_down(name)
    assert found[torch.ops.aten.bmm] == Layer(SHAPE).attention(dense)
    assert 0.2 * found[torch.ops.aten.bmm] < expected.attention < 0.7 * found[torch.ops.aten.bmm]


def test_padding_and_packing_ask_for_the_same():
    strategy = made_up_draft("dflash", SHAPE, made_up_target(SHAPE))
    samples = made_up_samples(strategy, SHAPE, (40, 25))
    rows = [
        tuple(
            strategy.forward_loss(lay(samples, names_of(samples)), StepContext(1, 4, training=True))
            .metric_sums["acc_denoms"]
            .tolist()
        )
        for lay in (strategy.collate, strategy.pack)
    ]
    assert rows[0] == rows[1]


def test_known_devices_have_a_peak_and_others_none():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("cpu") is None
