"""One name for a draft: what leaderboard, summary, comparison, decision and record show, every command accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from decision_site import HOUR, DecisionSite
from typer.testing import CliRunner

from draftworks.errors import ConfigError
from draftworks.evaluation.report.text_tables import render_text_table
from draftworks.programs.cli import app
from draftworks.programs.summary import build_results_table
from spec_assets.draft_inputs import locate_tuned_draft

NAME = re.compile(r"\b[0-9a-f]{16}\b")


def call(site: DecisionSite, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--registry", str(site.registry)])


def show(site: DecisionSite, *words: str) -> str:
    found = call(site, *words)
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    """A draft, and a tune of it, which is in service."""
    site = DecisionSite(tmp_path)
    site.complete(site.publish_draft("a", summary=HOUR), 2.0)
    site.promote()
    site.complete(site.tune("b", summary=HOUR), 2.1)
    site.promote()
    return site


def read_views(site: DecisionSite) -> dict[str, set[str]]:
    """The names of drafts that each view shows."""
    first, second = (record.draft.digest for record in site.open().register.read_history())
    summary = render_text_table(build_results_table("small", site.artifacts))
    rows = [line for line in summary.splitlines() if "eagle3_draft" in line]
    record = json.loads((site.open().register.folder / "in_service.json").read_text())
    said = {
        "leaderboard": show(site, "leaderboard"),
        "summary": "\n".join(rows),
        "compare": show(site, "compare", first, second),
    }
    compared = json.loads(show(site, "compare", first, second, "--json"))
    [begun] = [one["b"] for one in compared["recipe"] if one["key"] == "start_from"]
    sentences = {
        "decide": show(site, "decide", "small", "eagle3"),
        "in-service": show(site, "in-service", "small", "eagle3", "--history"),
    }
    return {
        **{view: set(NAME.findall(text)) for view, text in said.items()},
        **{view: set(re.findall(r"draft ([0-9a-f]{16})\b", text)) for view, text in sentences.items()},
        "compare --json": {compared["a"]["draft"], compared["b"]["draft"], begun},
        "in_service.json": {record["digest"], record["previous"]},
    }


def test_every_name_that_a_view_shows_is_accepted_by_every_command_whole_or_by_its_begin(site: DecisionSite):
    first, second = (record.draft.digest for record in site.open().register.read_history())
    views = read_views(site)
    assert views.pop("leaderboard") == views.pop("summary") == {second}
    assert views == dict.fromkeys(views, {first, second})
    for name in (first, second):
        for given in (name, name[:7]):
            assert f"draft {name}: " in show(site, "promote", "small", "eagle3", "--draft", given, "--dry-run")
            assert f"small/eagle3/{name}" in show(site, "compare", given, f"small/eagle3/{given}")
            assert name in show(site, "pin", "small", "eagle3_draft", "--digest", given)
            show(site, "unpin", "small", "eagle3_draft", given)
            assert locate_tuned_draft(site.artifacts, "small", "eagle3", given).name == name
    moved = show(site, "rollback", "small", "eagle3", "--draft", first[:7], "--expect", second[:7])
    assert f"rollback: draft {first} is in service" in moved


def test_a_data_version_is_answered_with_the_name_of_its_draft(site: DecisionSite):
    record = site.open().register.require()
    name, version = record.draft.digest, record.draft.weights
    for words in (
        ("promote", "small", "eagle3", "--draft", version),
        ("promote", "small", "eagle3", "--expect", version),
        ("rollback", "small", "eagle3", "--draft", version),
        ("compare", version, name),
        ("compare", f"small/eagle3/{version}", name),
        ("pin", "small", "eagle3_draft", "--digest", version),
    ):
        refused = call(site, *words)
        assert refused.exit_code == 1, words
        assert f"give {name}" in refused.stderr, words
    with pytest.raises(ConfigError, match=f"give {name}"):
        locate_tuned_draft(site.artifacts, "small", "eagle3", version)
    assert site.open().register.require() == record
