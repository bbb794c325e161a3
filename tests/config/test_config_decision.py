"""The section `decision` of a target: margins that contradict each other, and a decision without service."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from draftworks.config.operations import DecisionSpec
from draftworks.config.registry_files import TargetSpec


@pytest.mark.parametrize("margins", [(0.1, 0.1), (0.2, 0.1)])
def test_margins_that_contradict_each_other_are_refused(margins: tuple[float, float]):
    with pytest.raises(ValidationError, match=r"tune_margin 0\.[12] contradicts retrain_margin 0\.1"):
        DecisionSpec(tune_margin=margins[0], retrain_margin=margins[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"tune_margin": -0.1},
        {"retrain_margin": float("inf")},
        {"least_prompts": 0},
        {"act": "always"},
        {"traffic": -1},
        {"margin": 0.1},
    ],
)
def test_what_has_no_meaning_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        DecisionSpec(**wrong)


def test_nothing_acts_by_default():
    assert (DecisionSpec().act, DecisionSpec().hold, DecisionSpec().traffic) == ("none", False, 1.0)
    assert TargetSpec(name="a", model="m", dataset="d").decision is None


def test_a_decision_is_about_the_draft_in_service():
    with pytest.raises(ValidationError, match="decision: is about the draft in service: add a `service` section"):
        TargetSpec.model_validate({"name": "a", "model": "m", "dataset": "d", "decision": {}})
    TargetSpec.model_validate({"name": "a", "model": "m", "dataset": "d", "decision": {}, "service": {}})
