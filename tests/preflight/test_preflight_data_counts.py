"""Data that is too little for a global batch, for a held-out part, or for decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.service import LEAST_PROMPTS
from draftworks.preflight.data_checks import count_dataset


def make_chats(count: int, exchanges: int = 1) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}] * exchanges
    return [{"messages": [{"role": "user", "content": f"No. {number}"}, *turns[1:]]} for number in range(count)]


def train_with(fleet, batch: int, **entry: Any):
    training = {"global_batch_size": batch}
    fleet.write(
        strategies={"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}, "training": training}}, **entry
    )
    found = fleet.check()
    return [[text for text in texts if "global_batch_size" in text] for texts in (found.errors, found.warnings)]


def test_a_global_batch_of_more_than_all_samples_is_an_error(fleet):
    [error], warnings = train_with(fleet, 40)
    assert "found 40, and there are at most 26 samples to train on" in error
    assert warnings == []
    assert train_with(fleet, 26) == [[], []]


def test_conversations_of_several_answers_may_give_more_samples(fleet):
    fleet.write_rows(make_chats(30, exchanges=2))
    errors, [warning] = train_with(fleet, 40)
    assert errors == []
    assert "about 2" in warning
    [error], _ = train_with(fleet, 40, data={"only_last_turn": True})
    assert "global_batch_size: found 40" in error


@pytest.mark.parametrize(
    ("entry", "batch", "severity"),
    [
        ({}, 95, "warning"),  # of 100 rows, and each may have several answers beyond the first ones
        ({}, 60, None),
        ({"responses": {"mode": "passthrough"}}, 100, "error"),
        ({"responses": {"mode": "passthrough"}}, 95, "warning"),
        ({"responses": {"mode": "passthrough"}, "data": {"max_conversations": 40}}, 40, "error"),
        ({"data": {"max_conversations": 40}}, 40, "warning"),
    ],
)
def test_of_a_larger_data_set_only_the_bound_is_known(fleet, entry, batch, severity):
    fleet.write_rows(make_chats(100))
    errors, warnings = train_with(fleet, batch, **entry)
    assert (bool(errors), bool(warnings)) == (severity == "error", severity == "warning")


def test_a_hold_out_that_leaves_none_is_an_error_where_all_rows_are_known(fleet):
    fleet.write_rows(make_chats(6))
    fleet.write(data={"held_out_share": 0.001})
    assert any("the 0 rows held out: none of" in error for error in fleet.check().errors)
    fleet.write_rows(make_chats(300))
    fleet.write(data={"held_out_share": 0.001})
    found = fleet.check()
    assert found.errors == []
    assert any("about 0.3 of 300 conversations are held out" in warning for warning in found.warnings)
    fleet.write(data={"held_out_share": 0.1})
    assert fleet.check().warnings == []


def test_an_eval_set_of_held_out_rows_that_are_none_is_an_error(fleet):
    root = fleet.root / "registry"
    (root / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_chats(1)))
    (root / "datasets" / "gold.yaml").write_text("files: [gold.jsonl]\n")
    (root / "evals" / "gold.yaml").write_text("dataset: gold\npart: held_out\n")
    fleet.write(evals=["gold"], data={"held_out_share": 0.05}, strategies={})
    assert [error for error in fleet.check().errors if "the 0 rows of eval set gold" in error]
    (root / "evals" / "gold.yaml").write_text("dataset: gold\n")
    assert not [error for error in fleet.check().errors if "eval set gold" in error]


@pytest.mark.parametrize("rows", [30, 300])
def test_too_few_prompts_to_decide_by_are_a_warning(fleet, rows):
    fleet.write_rows(make_chats(rows))
    fleet.write(service={"least_prompts": 200}, decision={})
    found = fleet.check()
    assert found.errors == []
    assert any("eval set heldout has about" in warning and "below 200" in warning for warning in found.warnings)
    fleet.write(service={"least_prompts": 1}, decision={"least_prompts": 1})
    assert not any("eval set" in warning for warning in fleet.check().warnings)


def test_a_number_of_prompts_of_ones_own_stands_and_is_a_warning_below_the_default(fleet):
    for section in ("service", "decision"):
        for number, warned in ((20, True), (LEAST_PROMPTS - 1, True), (LEAST_PROMPTS, False), (500, False)):
            fleet.write(**{"service": {}, "decision": {}, section: {"least_prompts": number}})
            found = fleet.check()
            assert found.errors == []
            named = [text for text in found.warnings if f"{section}.least_prompts: found {number};" in text]
            assert len(named) == warned
            assert all(len(text) <= 200 for text in named)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_are_counted_up_to_what_matters(tmp_path: Path, suffix: str):
    path, rows = tmp_path / f"rows{suffix}", make_chats(12)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    dataset = DatasetSpec(name="rows", files=[path.name])
    assert count_dataset(dataset, tmp_path, 100) == 12
    assert count_dataset(dataset, tmp_path, 5) == 5
