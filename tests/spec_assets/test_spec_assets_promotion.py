"""The assets, checks and jobs of drafts in service: there where an entry asks for them, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from exchanging_vllm import ExchangingVLLM, SwapSite
from service_site import ServiceSite

from draftworks.service.candidate import State, read_states
from spec_assets.code_location import build_definitions
from spec_assets.definitions import REGISTRY
from spec_assets.promotion import list_promoted_strategies


@pytest.fixture
def site(tmp_path: Path) -> ServiceSite:
    return ServiceSite(tmp_path)


def run(site: ServiceSite, job: str, **config: Any) -> dg.ExecuteInProcessResult:
    name = "eagle3_promoted"
    found = build_definitions(site.registry).resolve_job_def(job)
    options = {"run_config": {"ops": {name: {"config": config}}}} if config else {}
    return found.execute_in_process(partition_key="small", raise_on_error=False, **options)


def materialize(site: ServiceSite) -> dg.ExecuteInProcessResult:
    """As a run of the whole graph does it after the exports."""
    defs = build_definitions(site.registry)
    job = defs.resolve_job_def("everything")
    return job.execute_in_process(
        partition_key="small", asset_selection=[dg.AssetKey("eagle3_promoted")], raise_on_error=False
    )


def read_metadata(result: dg.ExecuteInProcessResult) -> Mapping[str, Any]:
    [event] = result.get_asset_materialization_events()
    return {key: value.value for key, value in event.materialization.metadata.items()}


def explain(result: dg.ExecuteInProcessResult) -> str:
    return result.failure_data_for_node("eagle3_promoted").user_failure_data.description


def test_without_a_service_section_there_is_neither_an_asset_nor_a_job():
    defs = build_definitions(REGISTRY)
    assert not [key for key in defs.resolve_asset_graph().get_all_asset_keys() if "promoted" in key.to_user_string()]
    assert not [job.name for job in defs.resolve_all_job_defs() if "promote" in job.name or "rollback" in job.name]


def test_the_section_of_one_target_brings_the_assets_of_its_strategies_alone(site: ServiceSite):
    (site.registry / "targets" / "plain.yaml").write_text("model: m\ndataset: d\nstrategies: {dflash: {}}\n")
    (site.registry / "targets" / "broken.yaml").write_text("service: [")
    assert list_promoted_strategies(site.load_registry()) == ["eagle3"]
    names = {job.name for job in build_definitions(site.registry).resolve_all_job_defs()}
    assert {"promote_eagle3", "rollback_eagle3"} <= names
    assert "promote_dflash" not in names


def test_a_run_promotes_what_the_rule_accepts_and_says_who_when_why_and_the_figures(site: ServiceSite):
    first = site.publish("a", 1.0)
    done = materialize(site)
    assert done.success, [event.message for event in done.all_events if event.is_failure]
    second = site.publish("b", 1.2)
    found = read_metadata(materialize(site))
    assert (found["draft"], found["previous"], found["number"]) == (second, first, 2)
    assert found["who"].startswith("run ")
    assert found["why"] == "the rule accepts it"
    assert found["state"] == "promoted"
    assert found["when"]
    assert "non_inferior" in found["figures"]
    assert "+0.198 to +0.202" in found["figures"]


def test_a_refused_draft_is_a_warning_of_the_run_and_a_failure_of_the_job_that_asks_for_it(site: ServiceSite):
    first = site.publish("a", 1.0)
    materialize(site)
    site.publish("b", 0.5)
    result = materialize(site)
    assert result.success
    assert read_metadata(result)["draft"] == first
    asked = run(site, "promote_eagle3")
    assert not asked.success
    assert "worse: -0.500" in explain(asked)
    assert run(site, "promote_eagle3", action="promote", force=True, why="for a test").success
    assert site.open().register.require().forced


def test_the_job_rolls_back(site: ServiceSite):
    first = site.publish("a", 1.0)
    materialize(site)
    site.publish("b", 1.2)
    materialize(site)
    found = read_metadata(run(site, "rollback_eagle3"))
    assert (found["draft"], found["action"]) == (first, "rollback")
    again = run(site, "rollback_eagle3")
    assert "nothing to go back to" in explain(again)


def test_a_target_that_asks_first_has_an_accepted_draft_until_somebody_promotes_it(tmp_path: Path):
    site = ServiceSite(tmp_path, entry={"service": {"automatic": False}})
    first = site.publish("a", 1.0)
    assert not materialize(site).get_asset_materialization_events()
    assert read_states(site.open().register) == {first: State.ACCEPTED}
    assert run(site, "promote_eagle3").success
    second = site.publish("b", 1.1)
    assert read_metadata(materialize(site))["accepted"] == second
    assert read_states(site.open().register) == {first: State.PROMOTED, second: State.ACCEPTED}
    assert run(site, "promote_eagle3").success
    assert read_states(site.open().register) == {second: State.PROMOTED}


def test_a_canary_stands_beside_the_draft_with_the_figures_of_both(site: ServiceSite):
    site.publish("a", 1.0)
    materialize(site)
    second = site.publish("b", 1.1)
    found = read_metadata(run(site, "promote_eagle3", action="promote", canary=0.2))
    assert (found["canary"], found["canary_share"]) == (second, 0.2)
    assert "| 2.100 | 2.000 | +0.100 |" in " ".join(found["figures"].split())


@pytest.mark.parametrize(("code", "state"), [("raise SystemExit(1)", "promoted"), ("", "confirmed")])
def test_the_hook_is_called_and_its_failure_does_not_fail_the_run(tmp_path: Path, code: str, state: str):
    confirm = code or "import os; print('{\"confirmed\": \"' + os.environ['DRAFTWORKS_DRAFT'] + '\"}')"
    hook = {"command": [sys.executable, "-c", confirm], "attempts": 1}
    site = ServiceSite(tmp_path, entry={"service": {"hook": hook}})
    site.publish("a", 1.0)
    found = read_metadata(materialize(site))
    assert found["state"] == state
    assert ("failed 1 time," in found["hook"]) == bool(code)


def test_to_look_whether_a_step_has_something_to_do_puts_nothing_into_service(site: ServiceSite):
    from spec_assets.unchanged import find_unchanged_steps

    site.publish("a", 1.0)
    job = build_definitions(site.registry).resolve_job_def("promote_eagle3")
    with dg.DagsterInstance.ephemeral():
        from dagster._core.execution.api import create_execution_plan

        plan = create_execution_plan(job, tags={"dagster/partition": "small"})
        assert find_unchanged_steps(plan, job, "small", {}, site.registry) == []
    assert site.open().register.find() is None


def test_an_unknown_action_is_refused(site: ServiceSite):
    assert "expected promote or rollback" in explain(run(site, "promote_eagle3", action="rolback"))
    assert yaml.safe_load((site.registry / "targets" / "small.yaml").read_text())["service"] == {}


def test_a_run_tells_what_the_server_served_and_promotes_no_draft_again_that_it_went_back_from(tmp_path: Path):
    with ExchangingVLLM.make(tmp_path / "served").run() as server:
        server.by_reading = True
        section = {"bundle": False, "swap": server.describe(every_s=0.05)}
        site = SwapSite(tmp_path, entry={"service": section})
        first = site.publish("a", 1.0)
        server.accepts = {"default": 1.0, first: 1.0}
        assert materialize(site).success
        second = site.publish("b", 1.5)
        server.accepts |= {second: 0.5}
        found = read_metadata(materialize(site))
        assert (found["draft"], found["action"], server.version) == (first, "rollback", first)
        assert f"went back from draft {second} to {first}" in found["why"]
        assert "the server went back to it" in found["server"]
        again = read_metadata(materialize(site))
        assert (again["number"], server.exchanges) == (found["number"], [first, second, first])
