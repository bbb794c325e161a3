"""`draftworks slices`: from a fall in traffic over weights to a draft that was trained with them, as a user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from service_site import ServiceSite
from sliced_site import publish_sliced_report, publish_weighted_draft
from typer.testing import CliRunner

from draftworks.data.slices import read_plan
from draftworks.programs.cli import app
from draftworks.storage.artifacts import Artifact


@pytest.fixture
def site(tmp_path: Path) -> ServiceSite:
    return ServiceSite(tmp_path)


def call(site: ServiceSite, *words: str, strategy: str = "eagle3") -> Result:
    return CliRunner().invoke(app, ["slices", "small", strategy, *words, "--registry", str(site.registry)])


def promote(site: ServiceSite, draft: Artifact) -> None:
    site.publish_export(draft)
    site.promote(draft.path.name)


def test_a_fall_is_named_weighed_and_its_cure_reported(site: ServiceSite, tmp_path: Path):
    first = site.publish_draft("a")
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.0})
    promote(site, first)
    assert "nothing was measured since the promotion" in call(site).stdout
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.001})  # another report, and the same tokens were accepted
    assert "the same draft on the same prompts: no slice can have changed" in call(site).stdout
    fallen = publish_sliced_report(site, first, {"en": 2.0, "de": 1.5}, first=100)
    shown = call(site)
    assert shown.exit_code == 0, shown.stderr
    assert "fell: language de (2 slices compared, corrected by Holm)" in shown.stdout
    assert "-0.50" in shown.stdout

    weights = tmp_path / "weights" / "small.json"
    assert "language de: x 3" in call(site, "--save", str(weights)).stdout
    plan = read_plan(weights)
    assert [(one.column, one.value, one.weight) for one in plan.weights] == [("language", "de", 3.0)]
    assert plan.report == fallen.path.name
    assert "language de: x 1.5" in call(site, "--save", str(weights), "--max-weight", "1.5").stdout
    assert call(site, "--save", str(weights), "--max-weight", "99").exit_code == 1

    second = publish_weighted_draft(site, "b", plan)
    publish_sliced_report(site, second, {"en": 2.0, "de": 1.9}, first=100)
    helped = "Of 1 slice that this draft's data was weighted towards: 1 helped."
    assert f"draft {second.path.name}, not in service. {helped}" in call(site).stdout
    promote(site, second)
    said = call(site).stdout
    assert f"draft {second.path.name}. {helped}" in said
    assert "+0.40" in said
    assert "paired" in said


def test_no_fall_takes_the_weights_away_and_no_measurement_leaves_them(site: ServiceSite, tmp_path: Path):
    weights = tmp_path / "weights.json"
    first = site.publish_draft("a")
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.0})
    promote(site, first)
    assert f"no slice could be compared: {weights} is not written" in call(site, "--save", str(weights)).stdout
    assert not weights.exists()
    publish_sliced_report(site, first, {"en": 2.0, "de": 1.5}, first=100)
    call(site, "--save", str(weights))
    assert len(read_plan(weights).weights) == 1
    assert f"{weights} is left as it is" in call(site, "--save", str(weights), "--least-prompts", "99").stdout
    assert len(read_plan(weights).weights) == 1
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.1}, first=200)
    assert f"written: {weights}, without a weight: no slice fell" in call(site, "--save", str(weights)).stdout
    assert read_plan(weights).weights == ()


def test_what_cannot_be_compared_is_one_clear_error(site: ServiceSite):
    assert "draftworks promote small eagle3" in call(site).stderr
    assert "does not use dflash" in call(site, strategy="dflash").stderr
    first = site.publish_draft("a")
    report = publish_sliced_report(site, first, {"en": 2.0, "de": 2.0})
    promote(site, first)
    assert "eval set code: not in both reports; there is: heldout" in call(site, "--eval-set", "code").stderr
    assert "draft nothing has no report" in call(site, "--draft", "nothing").stderr
    publish_sliced_report(site, first, {"en": 2.0, "de": 1.5}, first=100)
    for path in report.path.rglob("*"):
        path.unlink() if path.is_file() else None
    refused = call(site)
    assert refused.exit_code == 1
    assert "is not there any more" in refused.stderr
