"""The leaderboard is made if nothing was measured yet, and in a target's job after any number of its reports."""

from dataclasses import replace

import dagster as dg
import pytest

from draftworks.strategies.eagle3.options import EAGLE3
from resources.workspace import Workspace
from spec_assets.leaderboard import make_leaderboard_asset


def materialized(result: dg.ExecuteInProcessResult) -> list[str]:
    return [event.asset_key.to_user_string() for event in result.get_asset_materialization_events()]


def report_of(strategy: str, targets: list[str]) -> dg.AssetsDefinition:
    """A report that only some targets have."""
    partitions = dg.StaticPartitionsDefinition(["both", "one", "none"])

    @dg.asset(name=f"{strategy}_report", partitions_def=partitions, output_required=False)
    def report(context: dg.AssetExecutionContext):
        if context.partition_key in targets:
            yield dg.MaterializeResult()

    return report


def test_without_any_report_every_target_has_a_row(site):
    (site.registry / "targets" / "broken.yaml").write_text("model: [")
    result = site.definitions().resolve_job_def("leaderboard").execute_in_process()
    metadata = result.get_asset_materialization_events()[0].materialization.metadata
    assert (metadata["dagster/row_count"].value, metadata["without_a_report"].value) == (2, 2)
    assert "no draft yet" in metadata["leaderboard"].value
    assert "broken.yaml" in metadata["leaderboard"].value
    assert "acceptance" not in metadata


def test_the_data_version_does_not_change_with_age(site):
    job = site.definitions().resolve_job_def("leaderboard")
    runs = [job.execute_in_process().get_asset_materialization_events()[0].materialization for _ in range(2)]
    assert len({run.tags["dagster/data_version"] for run in runs}) == 1


def test_a_registry_that_is_gone_is_a_failure_with_its_message(site):
    job = site.definitions().resolve_job_def("leaderboard")
    (site.registry / "targets").rename(site.registry / "elsewhere")
    result = job.execute_in_process(raise_on_error=False)
    failure = result.failure_data_for_node("ranking.rank").user_failure_data
    assert "expected a folder of YAML files" in failure.description


@pytest.mark.parametrize(
    ("target", "made"),
    [
        ("both", ["first_report", "second_report", "leaderboard"]),
        ("one", ["first_report", "leaderboard"]),
        ("none", []),
    ],
)
def test_a_strategy_that_a_target_does_not_use_does_not_keep_it_from_being_ranked(site, target, made):
    strategies = [replace(EAGLE3, name=name) for name in ("first", "second")]
    defs = dg.Definitions(
        assets=[report_of("first", ["both", "one"]), report_of("second", ["both"]), make_leaderboard_asset(strategies)],
        jobs=[dg.define_asset_job("all", dg.AssetSelection.all())],
        resources={"workspace": Workspace(registry_root=str(site.registry))},
    )
    result = defs.resolve_job_def("all").execute_in_process(partition_key=target)
    assert result.success
    assert materialized(result) == made
