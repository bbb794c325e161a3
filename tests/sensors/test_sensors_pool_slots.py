"""Slots of ended runs become free once, and only when, nothing of the runs uses them."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.test_utils import create_run_for_test
from dagster._daemon.monitoring import concurrency
from dagster._time import get_current_datetime
from toy_scheduler import ToyLauncherSpec, offer_toy

from resources.dead_runs import JOB_TAG, TAG
from resources.job_claims import JobClaim
from resources.process_tree import RunProcess
from resources.scheduler import SeenJob
from resources.torch_job import JobState, RunDir
from sensors import orphans
from sensors.orphans import make_pool_slot_sensor

ROOT = Path(__file__).resolve().parents[2]
POOL = "gpu"


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance as the checkout configures it."""
    settings = yaml.safe_load((ROOT / ".dagster" / "dagster.yaml").read_text())
    shipped = {"run_monitoring": settings["run_monitoring"], "concurrency": settings["concurrency"]}
    with dg.instance_for_test(overrides=shipped, temp_dir=str(tmp_path)) as found:
        found.event_log_storage.set_concurrency_slots(POOL, 3)
        yield found


def tick(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let Dagster's daemon look, an hour from now, and then the sensor; returns what the sensor says."""
    now = get_current_datetime()
    monkeypatch.setattr(concurrency, "get_current_datetime", lambda: now + datetime.timedelta(hours=1))
    daemon: Any = SimpleNamespace(instance=instance)
    list(concurrency.execute_concurrency_slots_iteration(daemon, logging.getLogger(__name__), None))
    result: Any = make_pool_slot_sensor()(dg.build_sensor_context(instance=instance))
    return result.skip_reason.skip_message


def hold_slot(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    run = create_run_for_test(instance, job_name="job", status=status)
    assert instance.event_log_storage.claim_concurrency_slot(POOL, run.run_id, "step").is_claimed
    return run


def holders(instance: dg.DagsterInstance) -> set[str]:
    return instance.event_log_storage.get_concurrency_run_ids()


def test_a_slot_stays_taken_while_the_job_of_an_ended_run_lives(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    offer_toy()
    run = hold_slot(instance, dg.DagsterRunStatus.STARTED)
    owner = RunProcess.of(run.run_id, os.getpid())
    claim = JobClaim.begin("dw-1", "t/draft", RunDir(tmp_path), owner, ToyLauncherSpec(root="x")).of_job("1")
    claim.publish(tmp_path / "job.json")
    gone = replace(owner, started=owner.started - 1)
    instance.add_run_tags(run.run_id, {TAG: gone.to_tag(), f"{JOB_TAG}dw-1": str(tmp_path / "job.json")})
    states = [JobState.RUNNING]
    seen = SimpleNamespace(look=lambda id: SeenJob(id, "dw-1", states[-1]))
    monkeypatch.setattr("resources.job_claims.make_scheduler", lambda spec: seen)
    assert tick(instance, monkeypatch) == "freed the pool slots of 0 runs; a job of 1 run lives"
    instance.report_run_failed(run)
    monkeypatch.setattr(orphans, "ENDED_FOR_S", 0.0)
    for _ in range(2):
        assert tick(instance, monkeypatch) == "freed the pool slots of 0 runs; a job of 1 run lives"
    assert holders(instance) == {run.run_id}
    states.append(JobState.SUCCEEDED)
    assert "freed the pool slots of 1 run;" in tick(instance, monkeypatch)
    assert holders(instance) == set()


def test_an_ended_run_without_a_job_loses_its_slots_when_its_processes_have_had_time_to_end(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    run = hold_slot(instance, dg.DagsterRunStatus.STARTED)
    instance.report_run_failed(run)
    tick(instance, monkeypatch)
    assert holders(instance) == {run.run_id}
    monkeypatch.setattr(orphans, "ENDED_FOR_S", 0.0)
    tick(instance, monkeypatch)
    assert holders(instance) == set()


def test_a_running_run_keeps_its_slots_and_a_killed_one_fails(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    lives, killed = (hold_slot(instance, dg.DagsterRunStatus.STARTED) for _ in range(2))
    for run, younger_s in ((lives, 0.0), (killed, 1.0)):
        process = RunProcess.of(run.run_id, os.getpid())
        instance.add_run_tags(run.run_id, {TAG: replace(process, started=process.started - younger_s).to_tag()})
    tick(instance, monkeypatch)
    assert holders(instance) == {lives.run_id}
    found = instance.get_run_by_id(killed.run_id)
    assert found is not None
    assert found.is_failure


def test_it_is_on():
    assert make_pool_slot_sensor().default_status is dg.DefaultSensorStatus.RUNNING
