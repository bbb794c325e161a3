"""A mix of what cannot be mixed, and shares of slices that no row has, are refused before anything is prepared."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml


def chats_of(fleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fleet.chats.read_text().splitlines()]


def mix(fleet, rows: list[dict[str, Any]], **options: Any) -> list[str]:
    root = fleet.root / "registry"
    (root / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "datasets" / "more.yaml").write_text(yaml.safe_dump({"files": ["more.jsonl"]}))
    fleet.write(mix={"datasets": ["more"], **options.pop("mix", {})}, **options)
    return fleet.check().errors


def test_tokenized_data_cannot_be_mixed(fleet):
    rows = [{"input_ids": [5, number, 7, 8], "loss_mask": [0, 0, 1, 1]} for number in range(9)]
    [error] = mix(fleet, rows, responses={"mode": "passthrough"})
    assert error == "target small: mix: data set more is tokenized already, and only conversations can be mixed"


@pytest.mark.parametrize(
    ("shares", "absent"),
    [
        ({"colour": {"red": 1}}, "colour: no conversation has red"),
        ({"topic": {"a": 0.5, "b": 0.25, "zzz": 0.25}}, "topic: no conversation has zzz"),
        ({"source": {"chats": 0.5, "mere": 0.5}}, "source: no conversation has mere; did you mean more?"),
        ({"prompt_length": {"under 5": 1}}, "prompt_length: no conversation has under 5"),
        ({"topic": {"a": 0.5, "b": 0.5, "zzz": 0}}, None),
        ({"topic": {"late": 1}}, None),
        ({"topic": {7: 1}}, None),
        ({"source": {"chats": 0.5, "more": 0.5}}, None),
        ({"language": {"en": 1}}, None),
    ],
)
def test_a_share_of_a_slice_that_no_row_has_is_refused(fleet, shares, absent):
    chats = chats_of(fleet)
    fleet.write_rows([{**row, "topic": "a"} for row in chats])
    rows = [{**row, "topic": "b"} for row in chats * 3] + [{**chats[0], "topic": "late"}, {**chats[1], "topic": 7}]
    errors = mix(fleet, rows, mix={"shares": shares})
    if absent is None:
        assert errors == []
    else:
        assert (
            [error for error in errors if f"mix.shares: {absent}" in error and "Set the share to 0" in error]
            == errors
            != []
        )
