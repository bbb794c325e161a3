"""The re-evaluation sensor compares with the records of real runs."""

from __future__ import annotations

from pathlib import Path

from resources.workspace import Workspace
from sensors.reevaluation import find_outdated


def test_after_everything_has_run_no_report_is_outdated(finished):
    workspace = Workspace(registry_root=str(finished.site.registry))
    assert workspace.artifacts.find("eagle3_report", "small") is not None
    assert find_outdated(workspace, "small") is None


def test_another_chat_template_outdates_the_report_of_its_target(finished, tmp_path: Path):
    site = finished.site.copy(tmp_path)
    (site.registry / "plain.jinja").write_text("{{ messages }}")
    site.target_file.write_text(site.target_file.read_text() + "chat_template: plain.jinja\n")
    found = find_outdated(Workspace(registry_root=str(site.registry)), "small")
    assert found.changes == ["tokenizer or chat template"]
