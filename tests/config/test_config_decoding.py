"""A decoding is named and kept so that it is read again, and one that means nothing is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config.data import AnswersSampling
from draftworks.config.decoding import GREEDY, RULE_MEANINGS, RULES, Decoding
from draftworks.errors import ConfigError

SAMPLED = st.builds(
    Decoding,
    temperature=st.sampled_from([0.05, 0.3, 0.7, 1.0, 1.25, 2.0]),
    rule=st.sampled_from(RULES),
    top_k=st.none() | st.integers(1, 5000),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.95, 1.0]),
)


@given(st.just(GREEDY) | SAMPLED)
def test_name_and_json_are_read_again(decoding: Decoding):
    assert Decoding.parse(decoding.suffix) == decoding
    assert Decoding.from_json({**decoding.to_json(), "seconds": 1.0}) == decoding


@given(SAMPLED, SAMPLED)
def test_two_decodings_have_two_names(one: Decoding, other: Decoding):
    assert (one.suffix == other.suffix) == (one == other)


def test_names_in_figures():
    assert GREEDY.suffix == "t0"
    assert Decoding(0.7, "greedy_draft").suffix == "t0.7_greedy_draft"
    assert Decoding(1.0, "rejection", 20, 0.9).suffix == "t1_k20_p0.9_rejection"
    assert GREEDY.to_json() == {"temperature": 0.0}
    assert Decoding(1.0, "rejection", 20, 0.9).describe() == "temperature 1, top-k 20, top-p 0.9"


def test_what_has_no_rule_is_of_before_there_were_several():
    assert Decoding.parse("t0.7") == Decoding.from_json({"temperature": 0.7}) == Decoding(0.7, "rejection")
    assert Decoding.from_json({"temperature": 0.0}) == GREEDY


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "rule": "greedy"},
        {"rule": "rejection"},
        {"top_k": 5},
        {"top_p": 0.9},
        {"temperature": 0.7, "rule": "rejection", "top_k": 0},
        {"temperature": 0.7, "rule": "rejection", "top_p": 0.0},
        {"temperature": 0.7, "rule": "rejection", "top_p": 1.5},
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, Any]):
    with pytest.raises(ConfigError):
        Decoding(**values)


@pytest.mark.parametrize("name", ["", "0.7", "t", "thot", "t0.7_k", "t0.7_greedily", "t0.7_rejection_again"])
def test_what_is_no_name_is_refused(name: str):
    with pytest.raises((ConfigError, ValueError)):
        Decoding.parse(name)


@given(SAMPLED)
def test_the_draft_proposes_its_likeliest_tokens_by_one_rule_only(decoding: Decoding):
    assert decoding.draft_temperature == (0 if decoding.rule == "greedy_draft" else decoding.temperature)


def test_every_rule_is_explained():
    assert set(RULE_MEANINGS) == set(RULES)


@given(SAMPLED)
def test_answers_are_of_the_distribution_that_is_served_where_temperature_and_cuts_are_the_same(decoding: Decoding):
    written = AnswersSampling(temperature=decoding.temperature, top_k=decoding.top_k, top_p=decoding.top_p)
    assert written.writes_as(decoding)
    assert not AnswersSampling().writes_as(decoding)
    assert not written.model_copy(update={"temperature": 0.6}).writes_as(decoding)
    assert not written.model_copy(update={"top_p": 0.6}).writes_as(decoding)
    assert AnswersSampling().writes_as(GREEDY)
