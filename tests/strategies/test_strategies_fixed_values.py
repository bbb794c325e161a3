"""Losses, counts and gradients of training are those in expected_training.json, which readers of exports give too.

To make the file again from the readers, after a change that is meant:

    PYTHONPATH=tests/toys python tests/strategies/test_strategies_fixed_values.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_reference import dflash2_sums, dflash_sums, domino_sums, dspark_sums, lilicorr_sums, xpress_sums
from dflash_toys import anchors_drawn, side_by_side
from eagle3_reference import reference
from fixed_values import CASES, HALFWAY, NAMES, projections, samples
from peagle_reference import peagle_sums

from draftworks.drafts.strategy import DraftStrategy

EXPECTED = Path(__file__).with_name("expected_training.json")
RELATIVE = 1e-6


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads(EXPECTED.read_text())


def test_every_case_has_its_values(expected):
    assert expected.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_loss_sums_and_gradients_are_the_fixed_ones(case, expected):
    strategy = CASES[case].strategy()
    output = strategy.forward_loss(strategy.collate(samples(strategy), NAMES), HALFWAY)
    counts = {name: output.metric_sums[name].tolist() for name in expected[case]["counts"]}
    found = {"loss_sum": output.loss_sum.item(), "counts": counts}
    assert_same({**found, "gradients": projections(strategy, output.loss_sum)}, expected[case], RELATIVE)


@pytest.mark.parametrize("case", CASES)
def test_the_readers_give_the_fixed_values(case, expected):
    assert_same(read(case), expected[case], 1e-9)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], relative: float) -> None:
    assert found["loss_sum"] == pytest.approx(wanted["loss_sum"], rel=relative)
    assert found["counts"].keys() == wanted["counts"].keys()
    for name, values in wanted["counts"].items():
        assert found["counts"][name] == pytest.approx(values, rel=relative, abs=1e-9)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, (norm, along) in wanted["gradients"].items():
        assert found["gradients"][name] == pytest.approx([norm, along], rel=relative, abs=relative * norm + 1e-12), name


def read(case: str) -> dict[str, Any]:
    """Return the values of a case as the independent readers of exports give them."""
    strategy = CASES[case].strategy()
    loss, counts = _chains(strategy) if strategy.name in ("eagle3", "peagle") else _blocks(strategy)
    return {"loss_sum": loss.item(), "counts": counts, "gradients": projections(strategy, loss)}


def _chains(strategy: DraftStrategy) -> tuple[torch.Tensor, dict[str, list[float]]]:
    drawn = samples(strategy)
    if strategy.name == "eagle3":
        found = reference(strategy, drawn)
        return found.loss, {"acc_corrects": found.corrects, "acc_denoms": found.denoms}
    kept = strategy.select_chains(strategy.collate(drawn, NAMES), HALFWAY)
    sums = [peagle_sums(strategy, one, side_by_side(one), kept[:, row]) for row, one in enumerate(drawn)]
    corrects = [sum(right) for right in zip(*(one.corrects for one in sums), strict=True)]
    return sum(one.loss for one in sums), {"acc_corrects": corrects, "acc_denoms": kept.sum(dim=(1, 2)).tolist()}


def _blocks(strategy: DraftStrategy) -> tuple[torch.Tensor, dict[str, list[float]]]:
    drawn, options = samples(strategy), strategy.options
    anchors = anchors_drawn(strategy, strategy.collate(drawn, NAMES), HALFWAY.global_step)
    of = {
        "dflash": dflash_sums,
        "dflash2": dflash2_sums,
        "domino": lambda *given: domino_sums(
            *given, options.compute_lambda_base(HALFWAY.global_step, HALFWAY.total_steps)
        ),
        "dspark": dspark_sums,
        "xpress": xpress_sums,
        "lilicorr": lilicorr_sums,
    }[strategy.name]
    sums = [of(strategy, one, side_by_side(one), at) for one, at in zip(drawn, anchors, strict=True)]
    by_place = {name: sum(one.by_place[name] for one in sums).tolist() for name in sums[0].by_place}
    return sum(one.loss for one in sums), by_place


def _format(name: str, values: dict[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(weight)}: {json.dumps(pair)}" for weight, pair in values["gradients"].items())
    rest = json.dumps({key: values[key] for key in ("loss_sum", "counts")}).removesuffix("}")
    return f' {json.dumps(name)}: {rest}, "gradients": {{\n{lines}\n }}}}'


if __name__ == "__main__":
    EXPECTED.write_text("{\n" + ",\n".join(_format(name, read(name)) for name in CASES) + "\n}\n")
