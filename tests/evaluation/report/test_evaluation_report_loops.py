"""Rung 4 in a report: when it was timed, and every difference from the walk, in all files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from report_toys import full_report

from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.measurement import TimingContext
from draftworks.evaluation.report.markdown import render_report
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import DIFFERENCES, REPORT
from draftworks.evaluation.report.writing import save_report

THEN = TimingContext("a GPU", datetime(2026, 3, 1, 22, 0, tzinfo=UTC))
FOUND = (
    Difference("s0", "target", 7, walk=31, loop=None, gap=3.2e-6),
    Difference("s2", "draft", 2, walk=40, loop=41, pass_number=1, place=0),
)


def report_with(differences: tuple[Difference, ...] | None, timing_context: TimingContext | None = THEN) -> Report:
    """Return a report whose greedy loop is compared and timed; its loop at temperature 0.7 is neither."""
    report = full_report()
    trained = report.drafts["trained"]
    greedy, sampled = trained.loops
    loops = (replace(greedy, differences=differences, timing_context=timing_context), sampled)
    return replace(report, drafts={**report.drafts, "trained": replace(trained, loops=loops)})


@pytest.mark.parametrize("differences", [None, (), FOUND], ids=["not compared", "none", "two"])
def test_report_round_trip(differences: tuple[Difference, ...] | None, tmp_path: Path) -> None:
    report = report_with(differences)
    save_report(report, tmp_path)
    assert Report.load(tmp_path) == report


def test_table_and_json_have_every_difference(tmp_path: Path) -> None:
    save_report(report_with(FOUND), tmp_path)
    table = pd.read_parquet(tmp_path / DIFFERENCES)
    assert table["draft"].tolist() == ["trained", "trained"]
    rows = table.drop(columns="draft").astype(object).where(table.notna(), None).to_dict("records")
    assert rows == [asdict(one) for one in FOUND]
    greedy, sampled = json.loads((tmp_path / REPORT).read_text())["drafts"]["trained"]["loops"]
    assert greedy["differences"] == [asdict(one) for one in FOUND]
    assert sampled["differences"] is None


def test_table_without_differences_has_the_same_types(tmp_path: Path) -> None:
    for name, differences in (("some", FOUND), ("none", ())):
        save_report(report_with(differences), tmp_path / name)
    empty = pd.read_parquet(tmp_path / "none" / DIFFERENCES, dtype_backend="pyarrow")
    assert empty.empty
    assert empty.dtypes.equals(pd.read_parquet(tmp_path / "some" / DIFFERENCES, dtype_backend="pyarrow").dtypes)


def test_report_of_before_there_were_differences_is_read(tmp_path: Path) -> None:
    save_report(report_with(None, timing_context=None), tmp_path)
    values = json.loads((tmp_path / REPORT).read_text())
    for loop in values["drafts"]["trained"]["loops"]:
        del loop["differences"], loop["occasion"]
    (tmp_path / REPORT).write_text(json.dumps(values))
    assert Report.load(tmp_path) == report_with(None, timing_context=None)


def test_markdown_says_that_nothing_differs() -> None:
    assert "none of 3 prompts differ" in render_report(report_with(()))


def test_markdown_shows_differences_with_their_gaps() -> None:
    lines = render_report(report_with(FOUND)).splitlines()
    assert any("2 of 3 prompts differ" in line for line in lines)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| s0", "| s2"))]
    assert rows == [
        ["s0", "answer", "7", "31", "ended", "3.2e-06 (target)"],
        ["s2", "proposal of pass 1, same answer", "2", "40", "41", "unknown"],
    ]


def test_markdown_shows_the_first_of_many_differences_and_says_where_the_others_are() -> None:
    many = tuple(replace(FOUND[0], sample_id=f"many{index}") for index in range(20))
    text = render_report(report_with(many))
    assert text.count("\n| many") == 12
    assert f"8 more are in `{DIFFERENCES}`" in text


def test_markdown_without_a_comparison_does_not_speak_of_one() -> None:
    assert "differ" not in render_report(report_with(None))


def test_markdown_says_when_and_where_the_speed_was_measured() -> None:
    assert "Rung 4 was timed: greedy on a GPU, 2026-03-01 22:00 UTC." in render_report(report_with(()))
    assert "was timed" not in render_report(report_with((), timing_context=None))
