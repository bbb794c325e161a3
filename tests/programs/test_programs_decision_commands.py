"""`draftworks decide`: what it prints, records and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from decision_site import DecisionSite
from typer.testing import CliRunner

from draftworks.decision.record import find_decision
from draftworks.programs.cli import app


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    return DecisionSite(tmp_path)


def ask(site: DecisionSite, *arguments: object, strategy: str = "eagle3"):
    return CliRunner().invoke(
        app, ["decide", "small", strategy, "--registry", str(site.registry), *map(str, arguments)]
    )


@pytest.mark.usefixtures("pictures")
def test_it_prints_choice_reasons_margins_and_costs_and_records_them(site: DecisionSite, tmp_path: Path):
    digest = site.publish("a", 2.0)
    site.promote()
    shown = ask(site, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert find_decision(site.artifacts.root, "small", "eagle3") is None
    picture = tmp_path / "loss.png"
    shown = ask(site, "--picture", picture)
    assert f"small, eagle3, draft {digest}: keep the draft in service" in shown.stdout
    assert "heldout: keep: lost +0.000 accepted tokens per pass (+0.000 to +0.000, 120 prompts)" in shown.stdout
    assert "margins: tuned above 0.05, trained from the start above 0.15; at least 120 prompts" in shown.stdout
    assert "cost: a tune not known yet" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = find_decision(site.artifacts.root, "small", "eagle3")
    assert found is not None
    assert (found.draft, found.number) == (digest, 1)


def test_what_cannot_be_decided_is_an_error_and_records_nothing(site: DecisionSite):
    shown = ask(site)
    assert shown.exit_code == 1
    assert "no eagle3 draft in service: run draftworks promote small eagle3" in shown.output
    assert "does not use 'dflash'" in ask(site, strategy="dflash").output
    assert not (site.artifacts.root / "decisions").exists()
