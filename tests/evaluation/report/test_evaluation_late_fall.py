"""Acceptance by the place in the text: a draft that fails late is found to, and named in the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from long_target import LongTarget, teach_draft, walk_by_position
from report_toys import QUICK, full_report, prompts

from draftworks.evaluation.ladder.prompt_acceptance import PromptsByPosition, micro_mean
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import SLICES, SLICES_PLOT
from draftworks.evaluation.report.writing import find_late_fall, render_report, save_report

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


TRAINED_ON, ANSWER, WINDOW = 96, 40, 24


@pytest.mark.parametrize(
    ("length", "ranges"),
    [(2048, 4), pytest.param(32_768, 8, marks=pytest.mark.long)],
    ids=["2k", "32k"],
)
def test_a_draft_that_knows_short_texts_dies_late_and_one_with_a_window_lives(length: int, ranges: int):
    torch.set_num_threads(1)
    target = LongTarget.make()
    samples = target.capture_long_texts(length, ANSWER)
    dying, living = (
        walk_by_position(teach_draft(target, TRAINED_ON, 110, window), samples) for window in (None, WINDOW)
    )
    assert list(dying) == list(living) == [0, *(256 * 2**power for power in range(ranges - 1))]
    early, *late = [micro_mean(prompts) for prompts in dying.values()]
    assert early > 2
    assert max(late) < 0.5 * early
    assert min(micro_mean(prompts) for prompts in living.values()) > 2
    assert find_late_fall(living, QUICK) is None
    report = full_report()
    measured = replace(report.drafts["trained"], walk_by_position=dying)
    text = render_report(replace(report, drafts={"trained": measured}))
    assert (
        f"**Late in the text the draft accepts less:** τ {1 + late[-1]:.2f} at {length // 2}-{length - 1}, {1 + early:.2f}"
        in text
    )
