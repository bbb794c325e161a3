"""The assets of servers in production: there where an entry has servers, and a reading with each materialization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest
from metrics_server import Pages, serve_pages, sglang_pages, vllm_pages
from observed_site import ObservedSite
from request_logs import make_traffic, write_log

from draftworks.targets.registry import Registry
from spec_assets.code_location import build_definitions
from spec_assets.definitions import REGISTRY
from spec_assets.observation import list_observed_strategies
from spec_assets.unused import find_unused_assets

NAME = "eagle3_observed"


@pytest.fixture
def pages() -> list[Pages]:
    return [Pages(sglang_pages(10, 20, 2)), Pages(vllm_pages(5, 5))]


@pytest.fixture
def site(tmp_path: Path, pages: list[Pages]) -> Iterator[ObservedSite]:
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_pages(each)) for each in pages]
        servers = [
            {"name": n, "url": u, "kind": k, "timeout_s": 30.0} for n, u, k in zip("ab", urls, ("sglang", "vllm"))
        ]
        yield ObservedSite.make(tmp_path, servers)


def run(site: ObservedSite) -> dg.ExecuteInProcessResult:
    job = build_definitions(site.registry).resolve_job_def("observe")
    return job.execute_in_process(partition_key="small", raise_on_error=False)


def test_without_servers_there_is_neither_an_asset_nor_a_job_nor_a_sensor():
    defs = build_definitions(REGISTRY)
    assert not [key for key in defs.resolve_asset_graph().get_all_asset_keys() if "observed" in key.to_user_string()]
    assert "observe" not in {job.name for job in defs.resolve_all_job_defs()}
    assert "observe_sensor" not in {sensor.name for sensor in defs.sensors or ()}


def test_servers_of_one_target_bring_the_assets_of_its_strategies_and_other_targets_do_not_use_them(site: ObservedSite):
    plain = site.registry / "targets" / "plain.yaml"
    plain.write_text("model: m\ndataset: d\nstrategies: {eagle3: {}, dflash: {}}\n")
    (site.registry / "targets" / "broken.yaml").write_text("servers: [")
    registry = Registry(site.registry)
    assert list_observed_strategies(registry) == ["eagle3"]
    defs = build_definitions(site.registry)
    assert "observe" in {job.name for job in defs.resolve_all_job_defs()}
    assert "has no servers" in find_unused_assets(registry.load_target("plain"), registry)[NAME]
    assert NAME not in find_unused_assets(registry.load_target("small"), registry)
    everything = defs.resolve_job_def("everything").asset_layer.executable_asset_keys
    assert dg.AssetKey(NAME) not in everything  # a run that trains asks no server


@pytest.mark.usefixtures("pictures")
def test_each_run_is_a_reading_with_a_table_and_figures_and_then_a_plot(site: ObservedSite, pages: list[Pages]):
    assert run(site).success
    pages[0].pages = sglang_pages(20, 50, 4)
    [event] = run(site).get_asset_materialization_events()
    found = {key: value.value for key, value in event.materialization.metadata.items()}
    assert found["acceptance_length_a"] == 4.0
    assert "| a " in found["servers"]
    assert "rung 6" in found["servers"]
    assert found["series"].startswith("![acceptance length τ](data:image/png")
    assert [len(one.readings) for one in site.open().recall()] == [2, 2]


def test_a_dead_server_is_a_warning_and_only_all_of_them_are_a_failure(site: ObservedSite, pages: list[Pages]):
    pages[0].pages = {}
    result = run(site)
    assert result.success
    [event] = result.get_asset_materialization_events()
    assert "is it SGLang" in str(event.materialization.metadata["servers"].value) or "no /metrics" in str(
        event.materialization.metadata["servers"].value
    )
    pages[1].pages = {}
    failed = run(site)
    assert not failed.success
    said = failed.failure_data_for_node(NAME).user_failure_data.description
    assert said.startswith("no server could be read:\nserver a (")


def test_logs_of_requests_bring_the_asset_without_a_server_and_their_slices(site: ObservedSite):
    site.change_entry(servers=[], observation={"requests": {"files": ["logs/*.jsonl"]}})
    assert list_observed_strategies(Registry(site.registry)) == ["eagle3"]
    write_log(site.registry / "logs" / "a.jsonl", make_traffic({"chat": (0.5, 0.5), "tutor": (0.6, 0.3)}, each=4))
    [event] = run(site).get_asset_materialization_events()
    found = {key: value.value for key, value in event.materialization.metadata.items()}
    assert "| source " in found["requests"]
    assert "fell: source tutor" in found["requests"]
    assert found["fallen_slices"] >= 1
    assert found["difference_requests"] < 0
    assert "servers" not in found
