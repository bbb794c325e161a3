"""Reports are stale once target, eval data or draft are others than they were made from, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_fleet import MeasuredFleet, walk

NAME = "one"


@pytest.fixture
def fleet(tmp_path: Path) -> MeasuredFleet:
    fleet = MeasuredFleet(tmp_path)
    fleet.add_measured(NAME, walk(1.0))
    return fleet


def test_a_report_of_what_is_there_is_not_stale(fleet: MeasuredFleet):
    assert fleet.standing(NAME).stale_against == ()


def test_a_draft_of_equal_weights_made_in_another_way_needs_a_report_of_its_own(fleet: MeasuredFleet):
    """Options may differ that change what servers do with the same weights."""
    fleet.publish("eagle3_draft", NAME, "first draft", {"options": {"ttt_length": 5}})
    assert fleet.standing(NAME).stale_against == ("eagle3 draft",)
    fleet.publish_report(NAME, walk(1.0), day=2)
    assert fleet.standing(NAME).stale_against == ()


@pytest.mark.parametrize(
    ("file", "words"),
    [("model.safetensors", "weights of the target"), ("tokenizer.json", "tokenizer or chat template")],
)
def test_a_replaced_file_of_the_target_makes_its_reports_stale(fleet: MeasuredFleet, file: str, words: str):
    (fleet.model(NAME) / file).write_text("of another one altogether")
    assert words in fleet.standing(NAME).stale_against
