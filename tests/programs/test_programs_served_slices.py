"""The command slices by logged requests: what fell without an evaluation, and weights for a mix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from promised_site import PromisedSite
from request_logs import make_traffic
from typer.testing import CliRunner, Result

from draftworks.data.slices import read_plan
from draftworks.programs.cli import app


@pytest.fixture
def site(tmp_path: Path) -> PromisedSite:
    site = PromisedSite(tmp_path)
    site.promote(site.publish("a", 1.0))
    return site


def log(site: PromisedSite, hours: int = 72, draft: str | None = None) -> None:
    served = site.open().register.require().draft.digest if draft is None else draft
    traffic = make_traffic({"chat": (0.5, 0.5), "tutor": (0.6, 0.4)}, hours)
    site.write(*(replace(each, draft=served, turn=1 + (each.source == "tutor")) for each in traffic))


def call(site: PromisedSite, *words: str) -> Result:
    return CliRunner().invoke(app, ["slices", "small", "eagle3", "--served", *words, "--registry", str(site.registry)])


def test_weights_of_a_mix_come_from_requests_alone(site: PromisedSite, tmp_path: Path):
    log(site)
    path = tmp_path / "weights.json"
    found = call(site, "--save", str(path))
    assert found.exit_code == 0, found.output
    assert "fell: source tutor" in found.output or "fell: turn 2" in found.output
    plan = read_plan(path)
    weights = {(one.column, one.value): one.weight for one in plan.weights}
    assert weights["source", "tutor"] == 3.0  # it accepts a third less
    assert {column for column, _ in weights} <= {"source", "language"}  # data has no column of turns
    report = site.artifacts.list_all("eagle3_report", "small")[0]
    assert (plan.eval_set, plan.report, plan.reference) == ("heldout", report.path.name, report.path.name)


def test_what_cannot_be_compared_is_told_and_nothing_is_written(site: PromisedSite, tmp_path: Path):
    path = tmp_path / "weights.json"
    assert "no request to compare: no file matches" in call(site, "--save", str(path)).output
    log(site, hours=20)
    assert "are not over" in call(site, "--save", str(path)).output
    log(site, draft="of another installation")
    found = call(site, "--save", str(path))
    assert (found.exit_code, path.exists()) == (1, False)
    assert "has no report here" in found.output
