"""What rungs 1 and 4 are measured by, and that greedy results from before there were rules stay what they were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from draftworks.config.decoding import GREEDY, RULES, Decoding, LoopSpec
from draftworks.config.registry_files import INTERVALS_REVISION, EvaluationSpec

BEFORE = {
    "draft_tokens": None,
    "loop": {"prompts": 16, "temperatures": [0.0], "compute_dtype": "float32"},
    "confidence": 0.95,
    "resamples": 2000,
    "slices": ["length"],
    "intervals": INTERVALS_REVISION,
}


def test_an_evaluation_that_is_greedy_has_the_identity_that_it_had():
    assert EvaluationSpec().to_identity(("eagle3", "dspark")) == EvaluationSpec().to_identity() == BEFORE


def test_one_that_samples_has_another_than_before_with_the_rules_of_its_own_strategies():
    spec = EvaluationSpec(loop=LoopSpec(temperatures=[0.0, 0.7]))
    loop = spec.to_identity(("dspark",))["loop"]
    assert loop["rules"] == {"dspark": ["greedy_draft", "rejection"]}
    assert loop != {**BEFORE["loop"], "temperatures": [0.0, 0.7]}
    assert spec.to_identity(("eagle3",)) != spec.to_identity(("dspark",))


def test_what_reads_greedy_figures_only_has_no_rules_in_its_identity():
    spec = EvaluationSpec(loop=LoopSpec(temperatures=[0.7], rules=["block"], top_p=0.9))
    assert spec.to_identity()["loop"] == {**BEFORE["loop"], "temperatures": [0.7]}


def test_rules_asked_for_are_the_unasked_ones_where_they_are_the_same():
    asked = LoopSpec(temperatures=[0.7], rules=["greedy_draft"])
    unasked = LoopSpec(temperatures=[0.7])
    assert asked.to_identity(("eagle3",)) == unasked.to_identity(("eagle3",))
    assert asked.to_identity(("dspark",)) != unasked.to_identity(("dspark",))


def test_decodings_are_one_for_each_temperature_and_rule():
    spec = LoopSpec(temperatures=[0.7, 0.0, 1.0], top_k=20, top_p=0.9)
    both = [Decoding(0.7, rule, 20, 0.9) for rule in ("greedy_draft", "rejection")]
    assert spec.list_decodings("dspark") == (
        *both,
        GREEDY,
        *(Decoding(1.0, rule, 20, 0.9) for rule in ("greedy_draft", "rejection")),
    )
    assert spec.list_decodings("eagle3") == (both[0], GREEDY, Decoding(1.0, "greedy_draft", 20, 0.9))


@given(st.lists(st.sampled_from([0.0, 0.7, 1.0]), unique=True, min_size=1), st.none() | st.just(list(RULES)))
def test_rung_1_is_of_what_samples_and_of_no_blocks(temperatures: list[float], rules: list[Any] | None):
    spec = LoopSpec(temperatures=temperatures, rules=rules if any(temperatures) else None)
    simulated = spec.list_simulated("dspark")
    assert set(simulated) <= set(spec.list_decodings("dspark"))
    assert {each.rule for each in simulated} == ({"greedy_draft", "rejection"} if any(temperatures) else set())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"top_k": 20}, "top_k without effect"),
        ({"top_p": 0.9, "rules": ["block"]}, "top_p, rules without effect.*leave them out"),
        ({"temperatures": [0.7], "rules": ["greedy"]}, "greedy_draft"),
        ({"temperatures": [0.7], "rules": []}, "at least 1"),
        ({"temperatures": [0.7], "rules": ["block", "block"]}, "found block twice"),
        ({"temperatures": [0.7], "top_k": 0}, "greater than or equal to 1"),
        ({"temperatures": [-0.7]}, "at least 0"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(values: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        LoopSpec(**values)
