"""docs/benchmarks.md is what `benchmarks/page.py` makes of the kept results, and of nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import page
import pytest
from figures import Aim, format_table
from page import COMMANDS, PAGE, RESULTS, ROOT, TEMPLATE, Machine, Result, read_results, render_page, run_benchmark

RESULT = Result(
    command="python benchmarks/x.py",
    date="2026-11-24T03:00:00+00:00",
    machine=Machine("A CPU", "AVX2", 1, "2.13.0"),
    load=(0.5, 0.1),
    seconds=3,
    output=f"{format_table(['', 'ms'], [['ours', '3 (2 to 4)']])}\n\n* {Aim('ours', 3, 2, at_most=True)}",
)


def test_the_page_is_that_of_the_kept_results():
    assert PAGE.read_text() == render_page(TEMPLATE.read_text(), read_results(RESULTS))


def test_every_benchmark_has_its_place_and_its_script():
    places = re.findall(r"<!-- result (\w+) -->", TEMPLATE.read_text())
    assert sorted(places) == sorted(COMMANDS)
    assert all((ROOT / re.findall(r"benchmarks/\w+\.py", command)[0]).exists() for command in COMMANDS.values())
    assert {path.stem for path in RESULTS.glob("*")} <= set(COMMANDS)


def test_a_section_without_its_result_is_left_out_and_named():
    template = "# Page\n\n## One\n\ntext\n\n<!-- result hf_rates -->\n\n## Two\n\n<!-- result prune -->\n"
    text = render_page(template, {"hf_rates": RESULT})
    assert "## One\n\ntext\n\n```bash\npython benchmarks/x.py\n```\n\n| " in text
    assert "*24 November 2026; A CPU (AVX2, 1 core), torch 2.13.0; load 0.1 to 0.5.*" in text
    assert "## Two" not in text
    assert "* `python benchmarks/prune.py`" in text.partition("## Without figures")[2]


def test_a_missed_aim_is_listed_and_a_reached_one_is_not():
    template = "## One\n\n<!-- result hf_rates -->\n"
    missed = render_page(template, {"hf_rates": RESULT}).partition("## Aims that were not reached\n\n")[2]
    assert missed.startswith("* ours: 3 (aim: at most 2). (`hf_rates`)\n")
    reached = replace(RESULT, output=f"* {Aim('ours', 3, 2)}")
    assert "not reached" not in render_page(template, {"hf_rates": reached})


def test_output_without_a_table_is_shown_as_text():
    assert "```text\na  b\n```" in replace(RESULT, output="a  b\n").render()


def test_a_benchmark_that_fails_keeps_the_result_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "COMMANDS", {"prune": "false", "plan": "echo ms"})
    monkeypatch.setattr(page, "TEMPLATE", tmp_path / "template.md")
    (tmp_path / "template.md").write_text("## A\n\n<!-- result prune -->\n\n## B\n\n<!-- result plan -->\n")
    RESULT.write(tmp_path / "prune.json")
    with pytest.raises(SystemExit, match="prune"):
        page.main(only=None, render=False)
    assert Result.read(tmp_path / "prune.json") == RESULT
    assert "```text\nms\n```" in (tmp_path / "page.md").read_text()


def test_a_run_file_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="make demo"):
        run_benchmark("echo {eagle3_draft}")
