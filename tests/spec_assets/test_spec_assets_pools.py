"""A step waits in the pool of its program's launcher, which a deployment and a target choose."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.reconstruct import ReconstructableJob
from dagster._core.execution.api import create_execution_plan
from dagster._core.execution.plan.plan import ExecutionPlan

from draftworks.config.launchers import PROGRAMS, parse_launcher
from draftworks.errors import ConfigError
from draftworks.targets.registry import Registry
from spec_assets.code_location import build_definitions
from spec_assets.common import PROGRAM_TAG, assign_pools
from spec_assets.definitions import REGISTRY


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    """The plan of the job that has all steps."""
    job = build_definitions(REGISTRY).resolve_job_def("everything")
    return create_execution_plan(job)


@pytest.fixture
def registry(tmp_path) -> Registry:
    (tmp_path / "registry" / "targets").mkdir(parents=True)
    shutil.copytree(REGISTRY / "datasets", tmp_path / "registry" / "datasets")
    return Registry(tmp_path / "registry")


def write(registry: Registry, deployment: dict, **launcher: object) -> None:
    (registry.root / "deployment.yaml").write_text(yaml.safe_dump({"launcher": deployment}))
    entry = {"model": "/nowhere", "dataset": "tiny", "launcher": launcher}
    (registry.root / "targets" / "small.yaml").write_text(yaml.safe_dump(entry))


def pools_of(plan: ExecutionPlan) -> dict[str, str | None]:
    """The pool of every step that runs a program."""
    return {step.key: step.pool for step in plan.steps if PROGRAM_TAG in step.tags}


def test_every_step_that_may_need_a_gpu_names_a_program_and_no_other_has_a_pool(plan):
    assert {step.tags[PROGRAM_TAG] for step in plan.steps if PROGRAM_TAG in step.tags} < set(PROGRAMS)
    assert set(pools_of(plan).values()) == {"gpu"}
    assert not [step.key for step in plan.steps if step.pool and PROGRAM_TAG not in step.tags]


def test_the_default_is_one_pool_for_all(plan, registry):
    write(registry, {})
    assert pools_of(assign_pools(plan, "small", registry)) == pools_of(plan)


def test_deployment_and_target_choose_pools_by_program(plan, registry):
    write(
        registry, {"pool": "node1", "programs": {"capture": {"pool": "node2"}}}, programs={"train": {"pool": "node3"}}
    )
    found = pools_of(assign_pools(plan, "small", registry))
    chosen = {name: found[name] for name in ("responses", "training_features", "eagle3_draft", "eagle3_report")}
    assert chosen == {
        "responses": "node1", "training_features": "node2", "eagle3_draft": "node3", "eagle3_report": "node1"
    }  # fmt: skip


def test_without_a_pool_a_step_does_not_wait(plan, registry):
    write(registry, {"pool": None})
    assert set(pools_of(assign_pools(plan, "small", registry)).values()) == {None}


def test_a_broken_entry_leaves_the_plan_as_it_was(plan, registry):
    write(registry, {}, pol="node1")
    assert assign_pools(plan, "small", registry) is plan
    assert assign_pools(plan, None, registry) is plan


def test_a_pool_is_a_word():
    with pytest.raises(ConfigError, match="pool"):
        parse_launcher({"pool": "node 1"}, "launcher")


LOCATION = '''
from pathlib import Path
import dagster as dg
from draftworks.targets.registry import Registry
from spec_assets.common import asset
from spec_assets.executor import make_executor

TARGETS = dg.StaticPartitionsDefinition(["near", "far"])

@asset(group="work", kinds=["python"], partitions_def=TARGETS, program="train")
def work(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """A step of a program."""
    storage = context.instance.event_log_storage
    held = [pool for pool in ("gpu", "node2") for slot in storage.get_concurrency_info(pool).claimed_slots
            if slot.run_id == context.run_id]
    return dg.MaterializeResult(metadata={"held": ",".join(held)})

defs = dg.Definitions(
    assets=[work], jobs=[dg.define_asset_job("make", selection=[work])],
    executor=make_executor(Registry(Path(__file__).parent / "registry"), preload=[]),
)

def make_job():
    return defs.resolve_job_def("make")
'''


def test_a_run_holds_a_place_of_its_targets_pool_while_the_default_is_taken(registry, tmp_path, monkeypatch):
    write(registry, {})
    shutil.copy(registry.root / "targets" / "small.yaml", registry.root / "targets" / "near.yaml")
    write(registry, {}, pool="node2")
    (registry.root / "targets" / "small.yaml").rename(registry.root / "targets" / "far.yaml")
    (tmp_path / "location.py").write_text(LOCATION)
    (tmp_path / "home").mkdir()
    shutil.copy(Path(__file__).parents[2] / ".dagster" / "dagster.yaml", tmp_path / "home")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("gpu", 1)
        assert storage.claim_concurrency_slot("gpu", "another run", "step").is_claimed
        job = ReconstructableJob.for_file(str(tmp_path / "location.py"), "make_job")
        with dg.execute_job(job, instance=instance, tags={"dagster/partition": "far"}) as result:
            (made,) = result.asset_materializations_for_node("work")
        assert made.metadata["held"].value == "node2"
        assert storage.get_concurrency_info("node2").slot_count == 1
