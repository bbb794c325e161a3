"""The page shows what there is, escapes all of it, and needs no other file, script or address."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from measured_fleet import MeasuredFleet, may, walk
from typer.testing import CliRunner

from draftworks.page.contents import read_page
from draftworks.page.rendering import render_fleet_page
from draftworks.programs.cli import app
from draftworks.storage.artifacts import Artifact

NOW = may(9).timestamp()
HOSTILE = "</td><script>alert(1)</script>&\"'"


class Tags(HTMLParser):
    """Names of elements, and values of attributes that could name another file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.targets += [
            value or "" for name, value in attrs if name in ("src", "href", "data", "action", "xlink:href")
        ]


@pytest.fixture
def fleet(tmp_path: Path) -> MeasuredFleet:
    return MeasuredFleet(tmp_path)


def render(fleet: MeasuredFleet) -> str:
    return render_fleet_page(read_page(fleet.registry, NOW))


def write_slices(report: Artifact, *values: str) -> None:
    rows = [
        {
            "column": "language",
            "value": value,
            "prompts": 5,
            "passes": 9,
            "micro": 0.5,
            "low": 0.2,
            "high": 0.9,
            "rival_micro": 0.7,
        }
        for value in values
    ]
    pd.DataFrame(rows).to_parquet(report.path / "heldout" / "slices.parquet")


def test_drafts_stand_in_the_order_of_need_with_their_figures(fleet: MeasuredFleet):
    fleet.add("empty")
    fleet.add_measured("good", walk(1.5))
    write_slices(fleet.artifacts.load_current("eagle3_report", "good"), "de")
    text = render(fleet)
    assert text.index("empty/eagle3") < text.index("good/eagle3")
    assert "2.50 ±0.10" in text
    assert "draftworks promote good eagle3" in text
    assert "language: de (5): 1.50 (1.20 to 1.90); for nothing 1.70" in text
    assert "Those without a link are not made yet" in text


def test_texts_are_escaped_and_nothing_is_loaded(fleet: MeasuredFleet):
    fleet.add_measured("good", walk(1.5))
    fleet.target_file("broken").write_text(f"model: {json.dumps(HOSTILE)}\n{HOSTILE}: 1\n")
    write_slices(fleet.artifacts.load_current("eagle3_report", "good"), HOSTILE)
    text = render(fleet)
    assert "&lt;script&gt;alert(1)" in text
    tags = Tags(text)
    assert not tags.names & {"script", "img", "link", "iframe", "object", "form"}
    assert all(each.startswith("#") for each in tags.targets)
    assert not re.search(r"url\(|@import|https?://", text)


def test_what_is_damaged_is_told_in_its_place_and_the_rest_is_shown(fleet: MeasuredFleet):
    fleet.add_measured("good", walk(1.5))
    fleet.add_measured("other", walk(0.5))
    (fleet.artifacts.load_current("eagle3_report", "good").path / "heldout" / "slices.parquet").write_bytes(b"half")
    (fleet.artifacts.load_current("eagle3_draft", "good").path / "history.json").write_text("{")
    (fleet.artifacts.root / "plans" / "good").mkdir(parents=True)
    (fleet.artifacts.root / "plans" / "good" / "plan.json").write_text("[]")
    page = read_page(fleet.registry, NOW)
    sections = {one.status.target: one for one in page.sections}
    assert sorted(each.split(": ")[0].split(" ")[0].rpartition("/")[2] for each in sections["good"].problems) == [
        "history.json",
        "plan.json",
        "slices.parquet",
    ]
    assert not sections["other"].problems
    assert sections["other"].eval_sets[0].drafts is not None
    assert "not a saved plan" in render_fleet_page(page)


def test_a_registry_without_a_target_says_what_to_do(fleet: MeasuredFleet):
    fleet.target_file("x").parent.mkdir(parents=True)
    assert "The registry names no draft yet" in render(fleet)


def test_the_command_writes_the_page_and_refuses_a_folder_that_is_no_registry(fleet: MeasuredFleet):
    fleet.add_measured("good", walk(1.5))
    done = CliRunner().invoke(app, ["page", "--registry", str(fleet.registry.root)])
    assert done.exit_code == 0
    path = fleet.artifacts.root / "fleet" / "fleet.html"
    assert done.stdout.split(": open")[0] == str(path)
    assert path.read_text().startswith("<!doctype html>")
    refused = CliRunner().invoke(app, ["page", "--registry", str(fleet.root / "none")])
    assert refused.exit_code == 1
    assert not (fleet.root / "none").exists()
