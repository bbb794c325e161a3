"""Losses and gradients of the training forms are those that plain transcriptions of the formulas once gave, one number after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixed_values import CASES, HALFWAY, NAMES, projections, samples

EXPECTED = json.loads((Path(__file__).parent / "expected_training.json").read_text())
RELATIVE = 1e-6


def test_every_case_has_its_values():
    assert EXPECTED.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_loss_sums_and_gradients_are_the_fixed_ones(case):
    strategy, expected = CASES[case].strategy(), EXPECTED[case]
    output = strategy.forward_loss(strategy.collate(samples(strategy), NAMES), HALFWAY)
    assert output.loss_sum.item() == pytest.approx(expected["loss_sum"], rel=RELATIVE)
    for name, values in expected["counts"].items():
        assert output.metric_sums[name].tolist() == pytest.approx(values, rel=RELATIVE, abs=1e-9)
    found = projections(strategy, output.loss_sum)
    assert found.keys() == expected["gradients"].keys()
    for name, (norm, along) in expected["gradients"].items():
        assert found[name] == pytest.approx([norm, along], rel=RELATIVE, abs=RELATIVE * norm + 1e-12), name
