"""The assets and jobs of decisions: there where an entry asks for them, and what their pages say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from decision_site import DecisionSite
from service_site import ServiceSite

from draftworks.decision.record import find_decision
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from spec_assets.code_location import build_definitions
from spec_assets.decisions import list_decided_strategies
from spec_assets.definitions import REGISTRY
from spec_assets.reports import ReportSubject, find_unmeasured_served
from spec_assets.unused import find_unused_assets


@pytest.fixture
def site(tmp_path: Path) -> DecisionSite:
    return DecisionSite(tmp_path)


def run(site: ServiceSite, job: str = "decide_eagle3") -> dg.ExecuteInProcessResult:
    found = build_definitions(site.registry).resolve_job_def(job)
    return found.execute_in_process(partition_key="small", raise_on_error=False)


def read_metadata(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    [event] = result.get_asset_materialization_events()
    return {key: value.value for key, value in event.materialization.metadata.items()}


def test_without_a_decision_section_there_is_neither_an_asset_nor_a_job(tmp_path: Path):
    for registry in (REGISTRY, ServiceSite(tmp_path).registry):
        defs = build_definitions(registry)
        names = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
        names |= {job.name for job in defs.resolve_all_job_defs()}
        assert not [name for name in names if "decision" in name or "decide" in name]


def test_the_section_of_one_target_brings_the_asset_of_its_strategies_alone(site: DecisionSite):
    (site.registry / "targets" / "plain.yaml").write_text(
        "model: m\ndataset: d\nservice: {}\nstrategies: {dflash: {}}\n"
    )
    assert list_decided_strategies(site.load_registry()) == ["eagle3"]
    defs = build_definitions(site.registry)
    names = {job.name for job in defs.resolve_all_job_defs()}
    assert "decide_eagle3" in names
    assert "decide_dflash" not in names
    decision = dg.AssetKey("eagle3_decision")
    for job in ("everything", "evaluate"):
        assert decision in defs.resolve_job_def(job).asset_layer.selected_asset_keys
    assert decision not in defs.resolve_job_def("train_eagle3").asset_layer.selected_asset_keys
    unused = find_unused_assets(site.load_registry().load_target("plain"), site.load_registry())
    assert unused["dflash_decision"] == "target plain asks for no decision about its dflash draft"
    assert "eagle3_decision" not in find_unused_assets(site.load_registry().load_target("small"), site.load_registry())


def test_a_run_says_what_why_what_it_costs_and_shows_the_intervals(site: DecisionSite):
    digest = site.publish("a", 2.0)
    site.promote()
    site.add_target("small", "second")
    site.measure(site.load_draft(digest), 1.9, "answered anew")
    result = run(site)
    assert result.success, [event.message for event in result.all_events if event.is_failure]
    found = read_metadata(result)
    assert (found["choice"], found["draft"], found["number"]) == ("tune", digest, 1)
    assert "heldout: tune: lost +0.100 accepted tokens per pass" in found["why"]
    assert "former figure, of other prompts" in found["why"]
    assert "+0.098 to +0.102" in found["figures"]
    assert (found["cost_of_tune"], found["cost_of_retrain"]) == ("not known yet", "not known yet")
    assert found["picture"].startswith("![loss on each eval set")
    recorded = find_decision(site.artifacts.root, "small", "eagle3")
    assert recorded is not None
    assert recorded.subject == found["subject"]
    assert read_metadata(run(site))["when"] == found["when"]


def test_without_a_draft_in_service_or_a_report_of_it_the_run_goes_on_and_nothing_is_decided(site: DecisionSite):
    result = run(site)
    assert result.success
    digest = site.publish("a", 2.0)
    site.promote()
    site.add_target("small", "second")
    result = run(site)
    assert result.success
    assert not result.get_asset_materialization_events()
    assert find_decision(site.artifacts.root, "small", "eagle3") is None
    assert digest


def test_a_draft_in_service_that_is_not_the_newest_one_is_measured_too(site: DecisionSite):
    digest = site.publish("a", 2.0)
    site.promote()
    newest = site.publish("b", 1.0)
    workspace = Workspace(registry_root=str(site.registry))

    def find() -> str | None:
        target = Registry(site.registry).load_target("small")
        made = site.load_draft(newest)
        found = find_unmeasured_served(workspace, ReportSubject(_eagle3(), target, made, made))
        return None if found is None else found.draft.path.name

    assert find() is None  # its report is of today
    site.add_target("small", "second")
    site.measure(site.load_draft(newest), 1.0, "answered anew")
    assert find() == digest
    site.measure(site.load_draft(digest), 1.9, "answered anew")
    assert find() is None
    site.add_target("small", "third")
    site.measure(site.load_draft(newest), 1.0, "fresher")
    plain = ServiceSite(site.root)  # the same target without `decision`
    plain.add_target("small", "third")
    assert find() is None


def _eagle3() -> Any:
    from draftworks.config.strategies import resolve_strategy

    return resolve_strategy("eagle3")


def test_to_look_whether_a_step_has_something_to_do_records_no_decision(site: DecisionSite):
    from dagster._core.execution.api import create_execution_plan

    from spec_assets.unchanged import find_unchanged_steps

    site.publish("a", 2.0)
    site.promote()
    job = build_definitions(site.registry).resolve_job_def("decide_eagle3")
    with dg.DagsterInstance.ephemeral():
        plan = create_execution_plan(job, tags={"dagster/partition": "small"})
        assert find_unchanged_steps(plan, job, "small", {}, site.registry) == []
    assert find_decision(site.artifacts.root, "small", "eagle3") is None
