"""Re-evaluation under a real `dagster-daemon`: it starts one run for the one target that changed, and no second.
Slots of ended runs become free once, and only when, nothing of the runs uses them.
"""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.scheduler.instigation import InstigatorState
from dagster._core.test_utils import create_run_for_test
from dagster._daemon.monitoring import concurrency
from dagster._time import get_current_datetime
from fleets import Fleet
from toy_scheduler import ToyLauncherSpec, offer_toy
from waiting import wait_until

from resources.dead_runs import JOB_TAG, TAG
from resources.job_claims import JobClaim
from resources.process_tree import RunProcess
from resources.scheduler import SeenJob
from resources.torch_job import JobState, RunDir
from sensors import orphans
from sensors.orphans import make_pool_slot_sensor

ROOT = Path(__file__).resolve().parents[2]
LOCATION = """
from pathlib import Path
from spec_assets.code_location import build_definitions
defs = build_definitions(Path(__file__).parent / "registry")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A DAGSTER_HOME that was opened before: two processes that open a new one at the same time corrupt it."""
    folder = tmp_path / "dagster_home"
    folder.mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", folder)
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        instance.get_runs()
        instance.all_instigator_state()
    return folder


@contextmanager
def dagster_daemon(fleet: Fleet, home: Path) -> Iterator[subprocess.Popen]:
    """A daemon over the fleet, ended by an interrupt as at a terminal."""
    location = fleet.root / "location.py"
    location.write_text(LOCATION)
    command = [sys.executable, "-m", "dagster._daemon", "run", "-f", location]
    with (home / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "DAGSTER_HOME": str(home)},
            cwd=home,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def sensor_states(instance: dg.DagsterInstance) -> list[InstigatorState]:
    """The sensor's state; none before its first tick."""
    return [state for state in instance.all_instigator_state() if state.name == "reevaluation_sensor"]


def has_looked_since(instance: dg.DagsterInstance, moment: float) -> bool:
    """Whether a look of the sensor began after this moment (seconds since the epoch) and has been completed."""
    states = sensor_states(instance)
    ticks = [tick for state in states for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id)]
    return any(tick.is_completed and tick.timestamp > moment for tick in ticks)


def lose_cursor(instance: dg.DagsterInstance) -> None:
    (state,) = sensor_states(instance)
    instance.update_instigator_state(state.with_data(state.instigator_data._replace(cursor=None)))


def wait_for_daemon(condition: Callable[[], bool], process: subprocess.Popen, home: Path) -> None:
    wait_until(condition, lambda: (home / "daemon.log").read_text()[-3000:], possible=lambda: process.poll() is None)


@pytest.mark.slow
def test_the_daemon_starts_one_run_for_the_changed_target_and_another_after_a_reset_of_the_cursor(fleet, home):
    fleet.publish_draft("two", "second")
    (fleet.registry / "deployment.yaml").write_text("automation: true\nreevaluation_interval_s: 1\n")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        with dagster_daemon(fleet, home) as process:
            # The run fails, for there is no real model: it is not tried again before somebody asks for it.
            wait_for_daemon(lambda: any(run.is_finished for run in instance.get_runs()), process, home)
            failed = time.time()
            wait_for_daemon(lambda: has_looked_since(instance, failed), process, home)
        lose_cursor(instance)
        restarted = time.time()
        with dagster_daemon(fleet, home) as process:
            wait_for_daemon(lambda: has_looked_since(instance, restarted), process, home)
            assert len(instance.get_runs()) == 2
        runs = instance.get_runs()
    assert [(run.job_name, run.tags["dagster/partition"]) for run in runs] == [("evaluate", "two")] * 2
    assert {run.tags["draftworks/because"] for run in runs} == {"changed: eagle3 draft"}


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
