"""A report says what a user could have for nothing, in total, by slice and without answers that run in loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_toys import full_report, prompts

from draftworks.evaluation.ladder.measurement import DraftMeasurement
from draftworks.evaluation.ladder.statistics import compare_paired
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.rival_verdict import LostSlice, RivalVerdict
from draftworks.evaluation.report.summary import REPORT, SLICES, ReportSummary
from draftworks.evaluation.report.writing import render_report, save_report

MINE = [[3, 2]] * 4 + [[0, 0], [0, 1], [0, 0], [1, 0]]
LOOKUP = [[0, 0]] * 4 + [[3, 3], [3, 2], [2, 3], [3, 3]]
TASKS = ["chat"] * 4 + ["copy"] * 4
REPEATED = {f"s{index}": share for index, share in enumerate([0, 0, 0, 0, 0.7, 0, 0.5, 0.1])}


def report_of(mine: list[list[int]] = MINE) -> Report:
    """The draft accepts 2.5 a pass where people chat and a quarter where they copy, lookup nothing and 2.75."""
    report = full_report()
    drafts = {
        "trained": replace(report.drafts["trained"], walk=prompts(*mine), loops=()),
        "no_draft": DraftMeasurement(None, walk=prompts(*[[0, 0]] * 8)),
        "lookup": DraftMeasurement(None, walk=prompts(*LOOKUP)),
    }
    columns = pd.DataFrame({"task": TASKS}, index=[f"s{index}" for index in range(8)])
    return replace(report, drafts=drafts, columns=columns, repeated=REPEATED)


def test_the_verdict_is_on_the_best_and_names_the_slices_that_are_lost_beyond_chance():
    found = report_of().rivals
    assert found is not None
    assert (found.rival, found.accepted, found.rival_accepted, found.prompts) == ("lookup", 22 / 16, 22 / 16, 8)
    assert not found.beats_it  # no more is accepted than for nothing
    [lost] = found.lost
    paired = compare_paired(prompts(*MINE)[4:], prompts(*LOOKUP)[4:], report_of().resampling)
    assert lost == LostSlice("task", "copy", 4, "lookup", 0.25, 22 / 8, paired.interval.high)
    assert "It loses to what costs nothing in task copy (1.25 against 3.75 of lookup)" in found.describe()


def test_a_slice_whose_interval_reaches_0_is_not_called_lost():
    almost = [*MINE[:4], [3, 2], [3, 2], [3, 3], [2, 3]]
    found = report_of(almost).rivals
    assert found is not None
    assert (found.beats_it, found.lost) == (True, ())
    assert "loses" not in found.describe()


def test_the_page_warns_and_shows_who_wins_where_and_without_loops():
    lines = render_report(report_of()).splitlines()
    [warning] = [line for line in lines if "Warning: for nothing" in line]
    assert "τ 2.375 on the walk, against 2.375 of lookup, the best that costs nothing: +0.000" in warning
    row = next(line for line in lines if line.startswith("| lookup"))
    assert [cell.strip() for cell in row.split("|")][3] == f"{1 + 11 / 12:.2f}"  # without s4 and s6: 3 2 and 3 3
    [copy] = [line for line in lines if "| copy" in line]
    assert "lookup 3.75, wins" in copy
    [chat] = [line for line in lines if "| chat" in line]
    assert "wins" not in chat
    assert any(line.startswith("* `lookup`: prompt lookup") for line in lines)
    assert any(line.startswith("The answers of 2 of 8 samples run in loops: half of their 4-grams") for line in lines)
    assert not any(line.startswith("| lookup") and "·" in line for line in lines)  # it has no accuracies


def test_files_have_the_verdict_the_loops_and_the_best_rival_of_every_slice(tmp_path: Path):
    report = report_of()
    save_report(report, tmp_path)
    assert Report.load(tmp_path) == report
    assert ReportSummary.load(tmp_path).rivals == report.rivals
    values = json.loads((tmp_path / REPORT).read_text())
    assert values["answer_loops"]["in_loops"] == 2
    assert values["answer_loops"]["walk_without"]["lookup"] == pytest.approx(11 / 12)
    assert (values["drafts"]["lookup"]["result"], values["drafts"]["lookup"]["metrics"]) == (None, {})
    slices = pd.read_parquet(tmp_path / SLICES).set_index("value")
    assert slices["rival"].to_dict() == {"chat": "no_draft", "copy": "lookup"}  # of equal ones the first
    assert slices.loc["copy", "difference"] == 0.25 - 22 / 8


def test_a_report_from_before_has_no_verdict(tmp_path: Path):
    save_report(report_of(), tmp_path)
    values = json.loads((tmp_path / REPORT).read_text())
    del values["rivals"]
    (tmp_path / REPORT).write_text(json.dumps(values))
    assert ReportSummary.load(tmp_path).rivals is None


def test_of_many_lost_slices_the_worst_are_named():
    lost = tuple(LostSlice("task", f"t{index}", 9, "lookup", 0.0, 1.0, -0.5) for index in range(7))
    text = RivalVerdict("lookup", 2.0, 1.0, 0.5, 1.5, 0.95, 99, lost).describe()
    assert "task t4" in text
    assert "task t5" not in text
    assert text.endswith(" and 2 more")
