"""The leaderboard tells of every target, whatever state it is in, and compares only what compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from measured_fleet import MeasuredFleet, may, rung, walk
from typer.testing import CliRunner

from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.rival_verdict import RivalVerdict
from draftworks.fleet import leaderboard as views
from draftworks.programs.cli import app

NOW = may(3).timestamp()


@pytest.fixture
def fleet(tmp_path: Path) -> MeasuredFleet:
    return MeasuredFleet(tmp_path)


@pytest.fixture
def motley(fleet: MeasuredFleet) -> MeasuredFleet:
    """Two measured targets, one with a draft only, one with nothing, one whose entry is broken."""
    fleet.add_measured("low", walk(0.8))
    fleet.add_measured("top", walk(2.5))
    fleet.add("drafted")
    fleet.publish("eagle3_draft", "drafted", "a draft", {})
    fleet.add("empty")
    fleet.target_file("broken").write_text("'a|b[/c]': 1\nmodel: m\ndataset: d\n")
    return fleet


def test_every_target_has_a_row_the_most_accepted_first(motley):
    found = motley.standings()
    assert [one.target for one in found] == ["top", "low", "broken", "drafted", "empty"]
    assert [one.value for one in found] == [2.5, 0.8, None, None, None]


def test_a_row_without_a_value_says_why(motley):
    problems = {one.target: one.problem for one in motley.standings() if one.latest is None}
    assert "broken.yaml" in problems["broken"]
    assert "no report of its draft yet" in problems["drafted"]
    assert "no draft yet" in problems["empty"]


def test_the_latest_is_the_newest_report_and_the_best_the_highest_there_ever_was(fleet):
    fleet.add_measured("one", walk(2.0), day=1)
    fleet.publish_report("one", walk(1.5), day=2)
    found = fleet.standing("one")
    assert (found.latest.score.value, found.latest.created) == (1.5, may(2).timestamp())
    assert (found.best.score.value, found.best.created) == (2.0, may(1).timestamp())


def test_the_best_is_of_the_same_metric(fleet):
    fleet.add_measured("one", rung(1, "another_length", 9.0), day=1)
    fleet.publish_report("one", walk(0.3), day=2)
    assert fleet.standing("one").best.score.value == 0.3


def test_without_a_walk_the_product_of_marginals_stands_in_and_says_so(fleet):
    fleet.add_measured("one")
    score = fleet.standing("one").latest.score
    assert (score.metric, score.value, score.low) == ("simulated_acc_len", 0.5, None)


def test_an_earlier_report_of_another_schema_is_passed_over(fleet):
    fleet.add_measured("one", walk(1.0))
    fleet.publish_report("one", walk(7.0), schema=1)
    fleet.publish_report("one", walk(2.0), day=2)
    found = fleet.standing("one")
    assert (found.value, found.best.score.value, found.problem) == (2.0, 2.0, None)


def test_a_newest_report_of_another_schema_makes_a_row_that_says_so(fleet):
    fleet.add_measured("one", walk(1.0))
    fleet.publish_report("one", walk(7.0), schema=1)
    found = fleet.standing("one")
    assert found.latest is None
    assert "expected schema 2, found 1" in found.problem


def test_what_is_unchanged_is_not_stale(fleet):
    fleet.add_measured("one", walk(1.0))
    assert fleet.standing("one").stale_against == ()


def test_a_row_says_what_it_is_stale_against(fleet):
    fleet.add_measured("one", walk(1.0))
    fleet.publish("eagle3_draft", "one", "second draft", {})
    (fleet.model("one") / "model.safetensors").write_text("of a new model")
    found = fleet.standing("one")
    assert set(found.stale_against) == {"weights of the target", "eagle3 draft"}
    [first] = [one for one in fleet.artifacts.list_all("eagle3_draft", "one") if one.data_version == "first draft"]
    assert found.latest.draft == first.path.name


def test_a_target_whose_model_is_gone_keeps_its_value_and_says_so(fleet):
    fleet.add_measured("one", walk(1.0))
    (fleet.model("one") / "model.safetensors").unlink()
    found = fleet.standing("one")
    assert found.value == 1.0
    assert "expected *.safetensors weights" in found.problem


@pytest.mark.usefixtures("pictures")
def test_the_saved_table_has_every_row_with_numbers_as_numbers(motley, tmp_path):
    views.save(tmp_path / "board", motley.standings(), NOW)
    table = pd.read_parquet(tmp_path / "board" / views.TABLE)
    assert list(table["target"]) == ["top", "low", "broken", "drafted", "empty"]
    top = table.iloc[0]
    assert (top["value"], top["low"], top["high"], top["prompts"]) == (2.5, 2.4, 2.6, 9)
    assert (top["age_s"], top["age"], top["measured"]) == (2 * 86_400, "2 d", pd.Timestamp(may(1)))
    assert table["value"].isna().sum() == 3
    assert (tmp_path / "board" / views.PLOT).read_bytes().startswith(b"\x89PNG")


def test_without_a_value_there_is_a_table_and_no_picture(fleet, tmp_path):
    fleet.add_measured("one", walk(1.0))
    views.save(tmp_path / "board", fleet.standings(), NOW)
    views.save(tmp_path / "board", [], NOW)
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == [views.MARKDOWN, views.TABLE]
    assert len(pd.read_parquet(tmp_path / "board" / views.TABLE)) == 0


def test_markdown_has_the_value_its_interval_and_what_cannot_break_the_table(motley):
    found = views.markdown(motley.standings())
    lines = [line for line in found.splitlines() if line.startswith("|")]
    assert "3.50 (3.40–3.60)" in lines[2]
    assert f"| {may(1):%Y-%m-%d %H:%M} UTC" in lines[2]  # an age would be wrong when it is looked at
    assert "age" not in lines[0]
    assert len(lines) == 2 + 5
    assert "a\\|b" in lines[4]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_what_could_be_had_for_nothing_stands_beside_a_draft_and_an_old_report_has_a_blank(fleet, tmp_path):
    verdict = RivalVerdict("lookup", 1.0, 1.58, -0.7, -0.4, 0.95, 9)
    fleet.add_measured("old", walk(2.0))
    fleet.add_measured("one", walk(1.0))
    fleet.publish_report("one", walk(1.0), day=2, rivals=verdict)
    views.save(tmp_path / "board", fleet.standings(), NOW)
    old, one = views.cells(fleet.standing("old")), views.cells(fleet.standing("one"))
    assert (old["for nothing"], one["for nothing"]) == ("", "lookup 2.58 (-0.58)")
    table = pd.read_parquet(tmp_path / "board" / views.TABLE).set_index("target")
    assert table.loc["one", ["rival", "rival_value"]].tolist() == ["lookup", 1.58]
    assert table.loc["old", ["rival", "rival_value", "rival_difference"]].isna().all()


def test_over_one_prompt_no_interval_is_shown(fleet):
    fleet.add_measured("one", walk(1.25, prompts=1))
    assert views.cells(fleet.standing("one"), NOW)["acceptance length τ"] == "2.25"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (61, "1 min"), (7300, "2 h"), (86_400 * 40, "40 d")]
)
def test_an_age_is_in_its_largest_unit(seconds, text):
    assert views.format_age(seconds) == text


@pytest.mark.parametrize("border", ["", "| "])
def test_the_command_line_prints_every_row_as_it_is(motley, border: str, monkeypatch: pytest.MonkeyPatch):
    """On a terminal as a table of text, in a file as Markdown."""
    if not border:
        monkeypatch.setattr(text_tables, "find_terminal_width", lambda: 600)
    shown = CliRunner().invoke(app, ["leaderboard", "--registry", str(motley.registry.root)])
    assert shown.exit_code == 0
    places = [shown.output.index(f"\n{border}{name} ") for name in ("top", "low", "broken", "drafted", "empty")]
    assert places == sorted(places)
    assert "3.50 (3.40–3.60)" in shown.output
    assert "[/c]" in shown.output


def test_the_command_line_says_that_there_is_no_registry(tmp_path):
    shown = CliRunner().invoke(app, ["leaderboard", "--registry", str(tmp_path)])
    assert shown.exit_code == 1
    assert "expected a folder of YAML files" in shown.output


@pytest.mark.parametrize("module", ["draftworks.fleet.leaderboard", "draftworks.fleet.model_card"])
def test_a_code_location_may_import_it(module):
    heavy = ("torch", "pandas", "pyarrow", "matplotlib")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
