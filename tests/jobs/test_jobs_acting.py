"""The jobs that decisions start make a draft with all that it is made from.
The job that prunes, and its schedule.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from acting_fleet import ActingFleet
from retention_toys import make_result

from draftworks.targets.registry import Registry
from jobs.pruning import make_prune_job
from resources.workspace import Workspace
from sensors.running_targets import PARTITION_TAG
from sensors.schedules import make_prune_schedules
from spec_assets.code_location import build_definitions


def test_a_training_makes_all_that_its_draft_needs_and_no_other_draft(tmp_path: Path):
    acting = ActingFleet(tmp_path)
    acting.add("one")
    repository = build_definitions(acting.fleet.registry).get_repository_def()
    for name in ("retrain_eagle3", "tune_eagle3"):
        keys = repository.get_job(name).asset_layer.executable_asset_keys
        made = {key.to_user_string() for key in keys}
        assert {"conversations", "training_features", "heldout_eval_features"} <= made
        assert {f"eagle3_{what}" for what in ("draft", "report", "export", "promoted", "decision")} <= made
        assert not made & {"dflash_draft", "fp8_gate", "leaderboard"}


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "a.yaml").write_text("model: m\ndataset: d\n")
    (tmp_path / "deployment.yaml").write_text('var: var\nretention: {keep_days: 0, cron: "0 4 * * 0"}\n')
    for lr in (1, 2):
        make_result(tmp_path / "var", "x_draft", lr=lr)
    return tmp_path


def run(registry: Path, instance: dg.DagsterInstance, config: object) -> dict[str, object]:
    workspace = {"workspace": Workspace(registry_root=str(registry))}
    result = make_prune_job().execute_in_process(run_config=config, resources=workspace, instance=instance)
    [event] = [each for each in result.all_node_events if each.event_type_value == "STEP_OUTPUT"]
    return {key: value.value for key, value in event.step_output_data.metadata.items()}


def count_drafts(registry: Path) -> int:
    return len(list((registry / "var" / "x_draft" / "a").glob("*/artifact.json")))


def start_run(instance: dg.DagsterInstance) -> None:
    @dg.job(name="train_x")
    def train() -> None: ...

    instance.create_run_for_job(train, status=dg.DagsterRunStatus.STARTED, tags={PARTITION_TAG: "a"})


def test_a_run_removes_only_if_it_is_told_to_and_no_run_of_the_target_works(registry: Path):
    [schedule] = make_prune_schedules(Registry(registry))
    config = schedule.evaluate_tick(dg.build_schedule_context()).run_requests[0].run_config
    with dg.DagsterInstance.ephemeral() as instance:
        assert run(registry, instance, None)["would_remove_bytes"] > 1000
        start_run(instance)
        assert run(registry, instance, config)["left"] == 1
        assert count_drafts(registry) == 2
        instance.delete_run(instance.get_runs(dg.RunsFilter(job_name="train_x"))[0].run_id)
        assert run(registry, instance, config)["removed_bytes"] > 1000
    assert count_drafts(registry) == 1


def test_without_a_cron_there_is_no_schedule(registry: Path):
    (registry / "deployment.yaml").write_text("var: var\n")
    assert make_prune_schedules(Registry(registry)) == []
