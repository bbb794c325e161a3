"""What differs is named, all of it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.storage.files import describe_changes

VALUES = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 2), max_size=4)


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        ({"a": 1}, {"a": 2}, ["a: expected 1, found 2"]),
        ({"a": 1}, {}, ["a: expected 1, found nothing"]),
        ({}, {"a": None}, ["a: expected nothing, found None"]),
        ({"a": {"b": 1, "c": [1]}}, {"a": {"b": 1, "c": [2]}}, ["a.c: expected [1], found [2]"]),
        ({"a": {"b": {"c": 1}}}, {"a": 1}, ["a: expected nothing, found 1", "a.b.c: expected 1, found nothing"]),
        ({"b": 1, "a": "{x}"}, {"b": 2, "a": "{y}"}, ["a: expected {x}, found {y}", "b: expected 1, found 2"]),
    ],
)
def test_a_difference_is_said_with_both_values(expected: dict, found: dict, said: list[str]) -> None:
    assert describe_changes(expected, found) == said


@given(expected=VALUES, found=VALUES)
def test_exactly_the_values_that_differ_are_named(expected: dict[str, Any], found: dict[str, Any]) -> None:
    differing = {name for name in "abcd" if expected.get(name, "") != found.get(name, "")}
    assert describe_changes(expected, found, "{name}") == sorted(differing)
    assert describe_changes({"x": expected, "y": 0}, {"x": found, "y": 0}, "{name}") == [
        f"x.{each}" for each in sorted(differing)
    ]


def test_a_caller_says_it_in_its_own_words() -> None:
    assert describe_changes({"a": 2}, {"a": 1}, "{name} changed from {found} to {expected}") == [
        "a changed from 1 to 2"
    ]
