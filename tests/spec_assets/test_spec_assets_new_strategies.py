"""A strategy that an entry names while servers run is told, and is there after a reload or in runs that name their job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.execution.api import create_execution_plan, execute_run

from draftworks.config.registry_files import StrategyEntry, TargetSpec
from spec_assets.executor import RunExecutor, find_unmade_strategies

TOLD = "strategy dflash is new to this code location: reload it"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as found:
        yield found


@pytest.fixture(autouse=True)
def executor() -> Iterator[None]:
    """Runs as they are, but for steps in this process."""

    def make(registry: Any, preload: Any) -> dg.ExecutorDefinition:
        create: Any = dg.in_process_executor.executor_creation_fn
        return dg.ExecutorDefinition(
            name="here",
            executor_creation_fn=lambda context: RunExecutor(create(context), context.job, registry),
            config_schema=dg.in_process_executor.config_schema,  # pyright: ignore[reportArgumentType]
        )

    with mock.patch("spec_assets.code_location.make_executor", make):
        yield


def use(site: Any, *strategies: str) -> None:
    """Let the entry name these strategies, of a model that is not there: a run ends with its first step."""
    entry = yaml.safe_load(site.target_file.read_text())
    changed = {"model": str(site.root / "nowhere"), "strategies": {name: {} for name in strategies}}
    site.target_file.write_text(yaml.safe_dump({**entry, **changed}))


def start(site: Any, instance: dg.DagsterInstance, job: dg.JobDefinition, by: str) -> str:
    """Start a run as a server with this job does, in a process that loads the code location anew. Return what it says."""
    chosen: dict[str, Any] = {}
    if by == "launchpad":
        chosen = {"step_keys_to_execute": create_execution_plan(job).step_keys_to_execute}
    elif by == "materialize all":
        chosen = {"asset_selection": frozenset(job.asset_layer.selected_asset_keys)}
    elif by == "one asset":
        chosen = {"asset_selection": frozenset({dg.AssetKey("recipe")})}
    run = instance.add_run(dg.DagsterRun(job_name=job.name, tags={"dagster/partition": "small"}, **chosen))
    fresh = ReconstructableRepository.for_file(str(site.module()), "defs").get_reconstructable_job(job.name)
    if "asset_selection" in chosen:
        fresh = fresh.get_subset(asset_selection=chosen["asset_selection"])
    execute_run(fresh, run, instance)
    return "\n".join(each.user_message for each in instance.all_logs(run.run_id))


@pytest.mark.parametrize("by", ["launchpad", "materialize all"])
def test_a_run_from_pages_that_lack_a_strategy_tells_to_reload_and_after_that_has_it(site, instance, by):
    use(site, "eagle3")
    before = site.definitions().resolve_job_def("everything")
    use(site, "eagle3", "dflash")
    assert TOLD in start(site, instance, before, by)
    assert TOLD not in start(site, instance, site.definitions().resolve_job_def("everything"), by)


def test_a_run_that_names_its_job_alone_has_the_strategies_of_today(site, instance):
    """As a sensor, a schedule or the command line starts it."""
    use(site, "eagle3", "mtp")
    before = site.definitions().resolve_job_def("everything")
    use(site, "eagle3", "dflash")
    said = start(site, instance, before, "sensor")
    assert TOLD not in said
    assert "dflash_draft" in said
    assert "mtp" not in said


def test_what_was_made_of_a_strategy_that_no_entry_names_any_more_stays_in_the_instance(site, instance):
    use(site, "eagle3", "dflash")
    draft = dg.AssetKey("dflash_draft")
    instance.report_runless_asset_event(dg.AssetMaterialization(draft, partition="small", metadata={"steps": 7}))
    use(site, "eagle3")
    assert draft not in site.definitions().resolve_asset_graph().get_all_asset_keys()
    assert draft in instance.get_asset_keys()
    assert instance.get_materialized_partitions(draft) == {"small"}
    assert instance.get_latest_materialization_event(draft).asset_materialization.metadata["steps"].value == 7


def test_who_chooses_single_assets_is_told_nothing(site, instance):
    use(site, "eagle3", "dflash")
    assert TOLD not in start(site, instance, site.definitions().resolve_job_def("everything"), "one asset")


@pytest.mark.parametrize(
    ("left", "found"),
    [
        (set(), []),
        ({"dflash_draft", "dflash_report", "dflash_recipe"}, ["dflash"]),
        ({"dflash_draft", "dflash_report"}, ["dflash"]),
        ({"dflash_draft"}, []),
        ({"dflash_draft", "dflash_report", "dflash_recipe", "leaderboard"}, []),
        ({"dflash_draft", "dflash_report", "eagle3_draft", "eagle3_report"}, ["eagle3", "dflash"]),
        ({"dflash_recipe"}, []),
    ],
)
def test_a_strategy_is_new_where_nothing_but_its_assets_is_left_out(left, found):
    target = TargetSpec(
        name="one", model="m", dataset="d", strategies=dict.fromkeys(("eagle3", "dflash", "mtp"), StrategyEntry())
    )
    whole = {f"{name}_{kind}" for name in ("eagle3", "dflash") for kind in ("draft", "report", "recipe")} | {
        "leaderboard"
    }
    assert find_unmade_strategies(target, whole, whole - left) == found
