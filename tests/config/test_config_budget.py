"""The budget of a deployment: none by default, and contradictions are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.config.operations import BudgetSpec, DeploymentSpec
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError
from draftworks.targets.registry import Registry


def test_a_deployment_has_no_budget_by_default(tmp_path: Path):
    assert DeploymentSpec().budget is None
    (tmp_path / "deployment.yaml").write_text("budget: {gpu_hours_per_week: 12}\n")
    assert Registry(tmp_path).load_deployment().budget == BudgetSpec(gpu_hours_per_week=12)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "gpu_hours_per_week is missing"),
        ({"gpu_hours_per_week": -1}, "gpu_hours_per_week"),
        ({"gpu_hours_per_week": float("inf")}, "gpu_hours_per_week"),
        ({"gpu_hours_per_weak": 1}, "did you mean gpu_hours_per_week"),
        ({"gpu_hours_per_week": 1, "unknown_gpu_hours": 0}, "unknown_gpu_hours"),
        ({"gpu_hours_per_week": 1, "backoff_hours": 9, "longest_backoff_hours": 8}, "is shorter than backoff_hours 9"),
    ],
    ids=range(6),
)
def test_a_budget_that_makes_no_sense_is_refused(values: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_spec(BudgetSpec, values, "deployment.yaml: budget")
