"""The re-evaluation sensor compares with the records of real runs."""

from __future__ import annotations

from pathlib import Path

import yaml

from draftworks.fleet.leaderboard import Fleet
from draftworks.storage.records import ReportIdentity
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.reevaluation import find_outdated


def test_after_everything_has_run_no_report_is_outdated(finished_site):
    workspace = Workspace(registry_root=str(finished_site.registry))
    assert workspace.artifacts.find("eagle3_report", "small") is not None
    assert find_outdated(workspace, "small") is None


def test_another_chat_template_outdates_the_report_of_its_target(finished_site, tmp_path: Path):
    site = finished_site.copy(tmp_path)
    (site.registry / "plain.jinja").write_text("{{ messages }}")
    site.target_file.write_text(site.target_file.read_text() + "chat_template: plain.jinja\n")
    found = find_outdated(Workspace(registry_root=str(site.registry)), "small")
    assert found.changes == ["tokenizer or chat template"]


def test_a_changed_data_set_and_share_are_noticed_and_measured_by_evaluate_alone(finished_site, tmp_path: Path):
    site = finished_site.copy(tmp_path)
    workspace = Workspace(registry_root=str(site.registry))
    before = workspace.artifacts.load_current("heldout_responses", "small")
    site.write_chats(75)
    entry = yaml.safe_load(site.target_file.read_text())
    entry["data"]["held_out_share"] = 0.15
    site.target_file.write_text(yaml.safe_dump(entry))
    assert find_outdated(workspace, "small").changes == ["eval set heldout"]
    assert Fleet.of(Registry(site.registry)).standings()[0].stale_against == ("eval set heldout",)

    result = site.run("evaluate")
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    workspace = Workspace(registry_root=str(site.registry))
    answers, report = (
        workspace.artifacts.load_current(name, "small") for name in ("heldout_responses", "eagle3_report")
    )
    assert answers.data_version != before.data_version
    assert ReportIdentity.of(report).heldout.answers == answers.data_version
    assert find_outdated(workspace, "small") is None
    [standing] = Fleet.of(Registry(site.registry)).standings()
    assert standing.stale_against == ()  # measured on the data of today, but trained on the former
    assert any(change.startswith("training data") for change in standing.draft_changes)
