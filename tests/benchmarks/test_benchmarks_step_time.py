"""A step's parts add up, its products are all found, and each is timed at its own shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import step_time
import torch
from coverings import gate_or_long
from step_time import OperatorClock, StepTime, aims, measure_case, table
from train_step import STRATEGIES, Case

SMALL = {"hidden": 16, "intermediate": 24, "vocab": 64, "draft_vocab": 32, "ttt": 2}


def test_counts_every_product_at_its_sizes_and_strides():
    left, right = torch.randn(3, 4), torch.randn(5, 4)
    with OperatorClock() as clock:
        _ = left @ right.T
        _ = left @ right.T
        torch.addmm(torch.zeros(3), right, torch.ones(4, 3))
        _ = left + 1
    (twice, count), (added, once) = clock.products.items()
    assert [each.stride for each in twice.operands] == [(4, 1), (1, 4)]
    assert (count, once) == (2, 1)
    assert [each.size for each in added.operands] == [(3,), (5, 4), (4, 3)]
    assert clock.numbers_made == 2 * 3 * 5 + 5 * 3
    assert clock.seconds["attention"] == 0


@pytest.mark.parametrize("strategy", gate_or_long(STRATEGIES, ["eagle3", "dspark"]))
def test_every_strategy_has_a_row_whose_parts_are_in_it(strategy):
    row = measure_case(Case(24, 2, strategy, **SMALL), steps=2, square=64)
    parts = (row.products_ms, row.attention_ms, row.passes_ms, row.optimizer_ms, row.products_alone_ms)
    assert all(part > 0 for part in parts)
    assert row.reached > 0
    assert f"| 24x2 | {strategy} |" in table([row])


@pytest.mark.long
def test_a_compiled_step_has_its_share_beside_the_others(monkeypatch: pytest.MonkeyPatch):
    quick = partial(step_time.compile_blocks, backend="eager")  # C++ would take half a minute
    monkeypatch.setattr(step_time, "compile_blocks", quick)
    row = measure_case(Case(24, 2, "dflash", **SMALL), steps=2, square=64, compiles=True)
    assert row.compiled_ms is not None
    assert row.compiled_ms > 0
    assert row.compiling_s is not None
    assert row.compiling_s > 0
    assert table([row]).splitlines()[0].endswith("| reachable | share, compiled | compiling, s |")


def test_without_compiled_steps_there_are_no_columns_for_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_time, "compile_blocks", lambda strategy, device: False)
    row = measure_case(Case(24, 2, "dflash", **SMALL), steps=2, square=64, compiles=True)
    assert row.compiled is None
    assert "compil" not in table([row])


def test_shares_are_of_the_square_products_rate():
    row = StepTime("1x1", "eagle3", 200, 0, 60, 50, 20, 60, 10, 20, 40, gflop=8, sgemm_gflops=80)
    assert row.reached == pytest.approx(0.5)
    assert row.reachable == pytest.approx(1.0)
    assert replace(row, compiled_ms=100.0).compiled == pytest.approx(1.0)
    (aim,) = aims([row, replace(row, step_ms=400)])
    assert aim.found == pytest.approx(0.25)
    assert not aim.reached
