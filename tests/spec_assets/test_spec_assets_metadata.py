"""Metadata of figures, paths and rejected rows is short and readable."""

from __future__ import annotations

import json
import re
from pathlib import Path

import dagster as dg
import pytest

from draftworks.storage.artifacts import Artifact
from spec_assets.metadata import (
    describe_rejections,
    format_table,
    round_figures,
    select_acceptance,
    shorten_path,
    tabulate_sampled,
)


def artifact(path: Path) -> Artifact:
    return Artifact("conversations", "t", path, {}, "v", {}, {}, 0.0, 0.0)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.1810344827586208, 1.181), (0.00123456, 0.001235), (19876.54321, 19877.0), (0.0, 0.0), (-2.30000001, -2.3)],
)
def test_a_figure_has_the_digits_it_deserves(value, shown):
    assert round_figures(value) == shown
    assert round_figures(dg.MetadataValue.float(value)).value == shown
    assert round_figures(dg.MetadataValue.json({"a": [value]})).data == {"a": [shown]}


@pytest.mark.parametrize("exact", [123456789, "0123456789abcdef", True, None])
def test_counts_and_identities_are_whole(exact):
    assert round_figures(exact) is exact


def test_a_path_begins_at_the_folder_of_results():
    made = artifact(Path("/a/very/long/way/var/eagle3_draft/tiny/0123"))
    assert shorten_path(made).value == "var/eagle3_draft/tiny/0123"
    assert shorten_path(made, "checkpoints", "step1").value == "var/eagle3_draft/tiny/0123/checkpoints/step1"


def test_rungs_that_were_measured_are_figures_of_their_own():
    metrics = {"eval/simulated_acc_len": 1.2, "eval/rung3_walk_acc_len": 1.1, "eval/rung4_loop_t0_acc_len": None}
    found = select_acceptance(metrics, "_code")
    assert list(found.items()) == [("walk_acceptance_length_code", 2.1), ("simulated_acceptance_length_code", 2.2)]


def test_acceptance_above_temperature_0_stands_beside_its_rule_and_servers():
    metrics = {
        "eval/simulated_acc_len": 1.2,
        "eval/simulated_acc_len_t0.7_greedy_draft": 0.51234,
        "eval/rung4_loop_t0_acc_len": 1.0,
        "eval/rung4_loop_t0.7_rejection_acc_len": 0.75,
    }
    table = tabulate_sampled("dspark", metrics, "_code")["sampled_acceptance_code"].value
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert rows == [
        ["temperature 0.7", "greedy_draft", "vLLM 0.33", "1.512", ""],
        ["temperature 0.7", "rejection", "SGLang 0.5.23", "", "1.750"],
    ]
    assert tabulate_sampled("dspark", {"eval/simulated_acc_len": 1.2}) == {}


def test_rejected_rows_are_told_with_why_how_many_and_the_first(tmp_path):
    assert describe_rejections(artifact(tmp_path)) == {}
    rows = [
        {"file": "/data/chats.jsonl", "line": line, "reason": "no answer", "excerpt": "a | b\nc"} for line in (3, 9)
    ]
    rows.append({"sample_id": "5ab", "reason": "no room for an answer", "excerpt": "How do I"})
    (tmp_path / "quarantine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = describe_rejections(artifact(tmp_path))["rejected_because"].value
    lines = re.sub(" +", " ", text).splitlines()
    assert lines[2] == "| no answer | 2 | chats.jsonl:3 | a \\| b c |"
    assert lines[3] == "| no room for an answer | 1 | 5ab | How do I |"


def test_a_cell_cannot_break_its_table():
    assert len(format_table(("a", "b"), [("x|y", "first\nsecond")]).value.splitlines()) == 3
