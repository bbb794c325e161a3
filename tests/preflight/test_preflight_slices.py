"""A column to slice by is refused if no eval set has it, and only then."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml


def chats_of(fleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fleet.chats.read_text().splitlines()]


def slice_by(fleet, *columns: str, **entry: Any) -> list[str]:
    fleet.write(evaluation={"slices": list(columns)}, **entry)
    return fleet.check().errors


def add_eval_set(fleet, rows: list[dict[str, Any]]) -> None:
    root = fleet.root / "registry"
    (root / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "datasets" / "gold.yaml").write_text("files: [gold.jsonl]\n")
    (root / "evals" / "gold.yaml").write_text("dataset: gold\n")


def test_a_column_that_no_eval_set_has_is_refused(fleet):
    fleet.write_rows([{**row, "topic": "numbers"} for row in chats_of(fleet)])
    [error] = slice_by(fleet, "length", "topics")
    assert error == "target small: evaluation.slices: no eval set has a column 'topics'; did you mean topic?"
    [error] = slice_by(fleet, "weather")
    assert error.endswith("no eval set has a column 'weather'; there are: length, topic")


@pytest.mark.parametrize("there", ["heldout", "gold"])
def test_a_column_of_one_eval_set_is_enough(fleet, there: str):
    chats = chats_of(fleet)
    topics = [{**row, "topic": "numbers"} for row in chats]
    fleet.write_rows(topics if there == "heldout" else chats)
    add_eval_set(fleet, topics if there == "gold" else chats)
    assert slice_by(fleet, "topic", evals=["gold"]) == []


def test_a_column_that_only_a_late_row_has_is_found(fleet):
    chats = chats_of(fleet)
    fleet.write_rows([*chats * 5, {**chats[0], "topic": "numbers"}])
    assert slice_by(fleet, "topic") == []
    assert len(slice_by(fleet, "topics")) == 1


def test_a_mix_has_columns_of_its_own(fleet):
    assert len(slice_by(fleet, "source")) == 1
    (fleet.root / "registry" / "more.jsonl").write_text(json.dumps(chats_of(fleet)[0]) + "\n")
    (fleet.root / "registry" / "datasets" / "more.yaml").write_text(yaml.safe_dump({"files": ["more.jsonl"]}))
    assert slice_by(fleet, "source", "language", mix={"datasets": ["more"]}) == []
