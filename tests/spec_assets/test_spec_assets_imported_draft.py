"""A checkpoint of other software becomes a draft of the graph: measured as it is, or trained further."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from draftworks.programs.cli import app
from draftworks.storage.artifacts import ArtifactStore


@pytest.mark.long
def test_an_imported_draft_is_measured_as_the_one_it_was(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    made = ArtifactStore(site.var)
    before = made.load_current("eagle3_report", "small").summary["drafts"]["trained"]
    source = made.load_current("eagle3_export", "small").path / "speculators_eagle3"
    arguments = [source, site.registry / "drafts" / "peer", "--target", "small", "--registry", site.registry]

    shown = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert shown.exit_code == 0, shown.output
    imported = yaml.safe_load(shown.stdout)["strategies"]["eagle3"]
    target = yaml.safe_load(site.target_file.read_text())
    entry = target["strategies"]["eagle3"]
    target["strategies"]["eagle3"] = {**imported, "training": {**entry["training"], **imported["training"]}}
    site.target_file.write_text(yaml.safe_dump(target))
    result = site.run("everything")

    assert result.success, [event.message for event in result.all_events if event.is_failure]
    draft, report = made.load_current("eagle3_draft", "small"), made.load_current("eagle3_report", "small")
    assert draft.summary["steps"] == 0
    measured = report.summary["drafts"]["trained"]
    for metric in ("eval/simulated_acc_len", "eval/rung3_walk_acc_len"):
        assert measured[metric] == pytest.approx(before[metric], abs=0.03)  # exports are rounded to bfloat16
    assert measured["eval/simulated_acc_len"] > report.summary["drafts"]["untrained"]["eval/simulated_acc_len"]


def test_what_is_no_draft_is_refused(finished_site, tmp_path):
    site = finished_site.copy(tmp_path)
    arguments = [site.tiny_folder, tmp_path / "peer", "--target", "small", "--registry", site.registry]
    shown = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert shown.exit_code == 1
    assert "not a draft format that Draftworks reads" in shown.output
    assert not (tmp_path / "peer").exists()
