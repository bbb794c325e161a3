"""A report says that a draft accepts less late in the text where that is clear, and is silent otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_toys import QUICK, full_report, prompts

from draftworks.evaluation.ladder.positions import PromptsByPosition
from draftworks.evaluation.report.late_fall import find_late_fall
from draftworks.evaluation.report.markdown import render_report
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import SLICES, SLICES_PLOT
from draftworks.evaluation.report.writing import save_report

EARLY, MIDDLE, LATE = prompts(*[[3, 2]] * 6), prompts(*[[2, 2]] * 6), prompts(*[[0, 1]] * 6)
DYING = {0: EARLY, 512: MIDDLE, 2048: LATE}


def report_with(walk: PromptsByPosition) -> Report:
    report = full_report()
    return replace(report, drafts={"trained": replace(report.drafts["trained"], walk_by_position=walk)})


def test_a_clear_fall_is_found_from_the_first_range_to_the_last():
    found = find_late_fall(DYING, QUICK)
    assert (found.first, found.late, found.before, found.after) == (0, 2048, 2.5, 0.5)
    assert found.interval.high < 0
    assert "τ 1.50 at 2048-4095, 3.50 at 0-255" in found.describe()


@pytest.mark.parametrize(
    "walk",
    [
        {},
        {0: EARLY},
        {0: EARLY, 2048: EARLY},
        {0: EARLY, 2048: MIDDLE},
        {0: LATE, 2048: EARLY},
        {0: EARLY, 2048: LATE[:4]},
        {0: EARLY, 2048: prompts(*[[3, 3]] * 3, *[[0, 0]] * 3)},
    ],
    ids=["nothing", "one range", "equal", "a little", "a rise", "few prompts", "by chance"],
)
def test_nothing_is_said_where_nothing_is_clear(walk: PromptsByPosition):
    assert find_late_fall(walk, QUICK) is None


def test_the_report_has_the_ranges_in_table_picture_and_words(tmp_path: Path):
    report = replace(report_with(DYING), columns=None)
    text = render_report(report)
    assert "| position   | 2048-4095" in text
    assert "> **Late in the text the draft accepts less:** τ 1.50" in text
    save_report(report, tmp_path)
    table = pd.read_parquet(tmp_path / SLICES)
    assert table[["column", "value", "prompts", "passes", "accepted"]].values.tolist() == [
        ["position", "0-255", 6, 12, 30],
        ["position", "512-1023", 6, 12, 24],
        ["position", "2048-4095", 6, 12, 6],
    ]
    assert (tmp_path / SLICES_PLOT).exists()
    assert Report.load(tmp_path).drafts == report.drafts
    assert "Late in the text" not in render_report(report_with({0: EARLY, 256: EARLY}))
    assert "| position" not in render_report(report_with({0: EARLY}))
