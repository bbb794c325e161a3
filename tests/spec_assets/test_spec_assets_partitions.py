"""Checks and materializations of one target neither apply to nor hide those of another."""

from collections.abc import Iterator

import dagster as dg
import pytest

from spec_assets.code_location import partition_assets, partition_checks

TARGETS = dg.StaticPartitionsDefinition(["bad", "odd", "good"])
"""`bad` fails the blocking check, `odd` fails those that do not block."""


@dg.asset(check_specs=[dg.AssetCheckSpec("of_the_step", asset="made", blocking=True)])
def made(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    return dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=context.partition_key != "bad")])


@dg.asset(deps=[made])
def after(context: dg.AssetExecutionContext) -> None: ...


@dg.asset_check(asset=made)
def beside(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=context.op_execution_context.partition_key == "good")


@dg.multi_asset_check(specs=[dg.AssetCheckSpec("of_many", asset="made")])
def many(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
    passed = context.op_execution_context.partition_key == "good"
    yield dg.AssetCheckResult(asset_key="made", check_name="of_many", passed=passed)


@dg.asset(deps=[made])
def of_all_targets() -> None: ...


@pytest.fixture
def definitions() -> dg.Definitions:
    return dg.Definitions(
        assets=[*partition_assets([made, after], TARGETS), of_all_targets],
        asset_checks=partition_checks([beside, many], TARGETS),
        jobs=[dg.define_asset_job("everything", dg.AssetSelection.all())],
    )


def test_a_target_that_passes_later_hides_no_failure_and_blocking_blocks_its_own_only(definitions):
    job, made_of, found = definitions.resolve_job_def("everything"), {}, {}
    with dg.DagsterInstance.ephemeral() as instance:
        for target in TARGETS.get_partition_keys():
            result = job.execute_in_process(partition_key=target, instance=instance, raise_on_error=False)
            assert result.success == (target != "bad")
            made_of[target] = {each.asset_key.to_user_string() for each in result.get_asset_materialization_events()}
        for name in ("of_the_step", "beside", "of_many"):
            key = dg.AssetCheckKey(dg.AssetKey("made"), name)
            history = instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
            found[name] = {each.partition: each.status.value for each in history}
    assert found["of_the_step"] == {"bad": "FAILED", "odd": "SUCCEEDED", "good": "SUCCEEDED"}
    for name in ("beside", "of_many"):
        assert (found[name]["odd"], found[name]["good"]) == ("FAILED", "SUCCEEDED")
    assert "after" not in made_of["bad"]
    assert made_of["odd"] == made_of["good"] == {"made", "after", "of_all_targets"}
