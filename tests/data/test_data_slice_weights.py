"""Weights of slices: bounded, deterministic, stable as data is added, and without effect on what drafts are measured on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftworks.config.registry_files import DataSpec
from draftworks.data.conversations import Conversation, Turn, select
from draftworks.data.prepare import choose_parts
from draftworks.data.slices import (
    LARGEST_WEIGHT,
    SlicePlan,
    SliceWeight,
    compute_weight,
    read_plan,
    save_plan,
    select_weighted,
)
from draftworks.data.split import is_held_out
from draftworks.errors import ConfigError

lengths = st.floats(0, 10)


def conversation(number: int, language: str = "en") -> Conversation:
    return Conversation.of([Turn("user", f"question {number}"), Turn("assistant", "")], {"language": language})


def plan(weight: float = 3.0, language: str = "de") -> SlicePlan:
    one = SliceWeight("language", language, weight, 2.0, 1.0)
    return SlicePlan("toy", "eagle3", "heldout", "new", "old", 3.0, (one,))


@given(before=lengths, after=lengths, bound=st.floats(1, LARGEST_WEIGHT))
def test_a_weight_is_between_1_and_its_bound_and_grows_with_the_loss(before, after, bound):
    weight = compute_weight(before, after, bound)
    assert 1 <= weight <= round(bound, 2)
    assert weight == 1 or after < before
    assert compute_weight(before, after / 2, bound) >= weight


def test_weights_of_known_losses():
    assert [compute_weight(2.0, after) for after in (2.0, 1.9, 1.8, 1.0, 0.0)] == [1.0, 1.5, 2.0, 3.0, 3.0]
    for bound in (0.5, 11.0, float("nan")):
        with pytest.raises(ConfigError, match="max_weight"):
            compute_weight(2.0, 1.0, bound)


@given(numbers=st.sets(st.integers(0, 999), min_size=1, max_size=40), count=st.integers(0, 40), data=st.data())
def test_the_choice_depends_on_content_only_and_one_more_replaces_at_most_one(numbers, count, data):
    made = [conversation(number, "de" if number % 3 else "en") for number in sorted(numbers)]
    mixed = data.draw(st.permutations(made))
    chosen = select_weighted(mixed, count, plan())
    assert chosen == select_weighted(made, count, plan())
    assert len(chosen) == min(count, len(made))
    more = select_weighted([*made, conversation(1000, "de")], count, plan())
    assert len({one.id for one in chosen} - {one.id for one in more}) <= 1
    for equal in (None, plan(1.0), plan(2.0, "fr")):
        assert select_weighted(mixed, count, equal) == select(made, count)


def test_a_slice_of_weight_w_is_taken_about_w_times_as_often():
    made = [conversation(number, "de" if number % 2 else "en") for number in range(8000)]
    chosen = select_weighted(made, 400, plan(3.0))
    german = sum(one.columns["language"] == "de" for one in chosen)
    assert 270 <= german <= 330  # three of four, a standard deviation is 9


@settings(max_examples=20)
@given(count=st.integers(10, 80), weight=st.floats(1, 10))
def test_weights_leave_the_held_out_part_and_the_size_of_the_other_alone(count, weight):
    made = [conversation(number, "de" if number % 4 == 0 else "en") for number in range(80)]
    data = DataSpec(max_conversations=count, held_out_share=0.2)
    plain, weighted = choose_parts(made, data, None).parts, choose_parts(made, data, plan(weight)).parts
    assert weighted["heldout"] == plain["heldout"]
    assert len(weighted["train"]) == len(plain["train"])
    assert not any(is_held_out(one.prompt_key, 0.2) for one in weighted["train"])
    german = [sum(one.columns["language"] == "de" for one in parts["train"]) for parts in (plain, weighted)]
    assert german[0] <= german[1]


def test_the_largest_weight_of_a_conversation_counts():
    both = SlicePlan("t", "s", "e", "n", "o", 3.0, (*plan(3.0).weights, SliceWeight("source", "app", 2.0, 2.0, 1.8)))
    assert both.weigh({"language": "de", "source": "app"}) == 3.0
    assert both.weigh({"language": "en", "source": "app"}) == 2.0
    assert both.weigh({}) == 1.0


def test_a_plan_comes_back_from_its_file_and_its_identity_is_that_of_its_weights(tmp_path):
    path = tmp_path / "weights.json"
    save_plan(path, plan())
    assert read_plan(path) == plan()
    other = SlicePlan("b", "dflash", "x", "y", "z", 9.0, (SliceWeight("language", "de", 3.0, 9.0, 1.0),))
    assert other.identity == plan().identity
    assert plan(2.0).identity != plan().identity != plan(language="fr").identity


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"weights": None},
        {"weights": [{}]},
        {"weights": [{"column": "a", "value": "b", "weight": 0.5, "before": 1, "after": 1}]},
        {"weights": [{"column": "a", "value": "b", "weight": 99, "before": 1, "after": 1}]},
        {"weights": [{"column": 1, "value": "b", "weight": 2, "before": 1, "after": 1}]},
        {"max_weight": True},
        {"target": None},
    ],
    ids=str,
)
def test_a_file_that_is_no_plan_is_one_clear_error(tmp_path, change):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({**plan().to_json(), **change}))
    with pytest.raises(ConfigError, match=r"weights.json: expected weights of slices, as `draftworks slices --save`"):
        read_plan(path)
    path.unlink()
    with pytest.raises(ConfigError, match="expected weights of slices"):
        read_plan(path)
