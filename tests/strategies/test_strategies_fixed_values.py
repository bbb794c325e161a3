"""Losses, counts and gradients of training are those in each strategy's expected.json, which readers of exports give too.

To make the files again from the readers, after a change that is meant:

    PYTHONPATH=tests/toys python tests/strategies/test_strategies_fixed_values.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_cases import FOLDER, HALFWAY, NAMES, find_cases, gradients, make, samples_for

from draftworks.drafts.strategy import DraftStrategy

CASES = [(name, fixed) for name, cases in find_cases().items() for fixed in cases.fixed]
EACH = pytest.mark.parametrize(("name", "fixed"), CASES)


def find_file(name: str) -> Path:
    return FOLDER / name / "expected.json"


def expected(name: str, fixed: str) -> dict[str, Any]:
    return json.loads(find_file(name).read_text())[fixed]


@EACH
def test_loss_sums_and_gradients_are_the_fixed_ones(name: str, fixed: str):
    strategy, wanted = make(name, **find_cases()[name].fixed[fixed]), expected(name, fixed)
    output = strategy.forward_loss(strategy.collate(samples_for(strategy), NAMES), HALFWAY)
    counts = {place: output.metric_sums[place].tolist() for place in wanted["counts"]}
    found = {"loss_sum": output.loss_sum.item(), "counts": counts}
    assert_same({**found, "gradients": projections(strategy, output.loss_sum)}, wanted, 1e-6)


@EACH
def test_the_readers_give_the_fixed_values(name: str, fixed: str):
    assert_same(read(name, fixed), expected(name, fixed), 1e-9)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], relative: float) -> None:
    assert found["loss_sum"] == pytest.approx(wanted["loss_sum"], rel=relative)
    assert found["counts"].keys() == wanted["counts"].keys()
    for place, values in wanted["counts"].items():
        assert found["counts"][place] == pytest.approx(values, rel=relative, abs=1e-9)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for weight, (norm, along) in wanted["gradients"].items():
        bound = relative * norm + 1e-12
        assert found["gradients"][weight] == pytest.approx([norm, along], rel=relative, abs=bound), weight


def read(name: str, fixed: str) -> dict[str, Any]:
    """Return the values of a case as the independent reader of exports gives them."""
    cases = find_cases()[name]
    strategy = make(name, **cases.fixed[fixed])
    found = cases.expect(strategy, samples_for(strategy), HALFWAY)
    counts = {place: values.tolist() for place, values in sorted(found.by_place.items())}
    return {"loss_sum": found.loss.item(), "counts": counts, "gradients": projections(strategy, found.loss)}


def projections(strategy: DraftStrategy, loss: torch.Tensor) -> dict[str, list[float]]:
    """Of every weight's gradient, its norm and its product with a fixed direction."""
    return {
        name: [float(g.norm()), float(g.flatten() @ torch.arange(g.numel(), dtype=torch.float64).cos())]
        for name, g in gradients(strategy, loss).items()
    }


def _format(fixed: str, values: dict[str, Any]) -> str:
    lines = ",\n".join(f"  {json.dumps(weight)}: {json.dumps(pair)}" for weight, pair in values["gradients"].items())
    rest = json.dumps({key: values[key] for key in ("loss_sum", "counts")}).removesuffix("}")
    return f' {json.dumps(fixed)}: {rest}, "gradients": {{\n{lines}\n }}}}'


if __name__ == "__main__":
    for name, cases in find_cases().items():
        values = ",\n".join(_format(fixed, read(name, fixed)) for fixed in cases.fixed)
        find_file(name).write_text("{\n" + values + "\n}\n")
