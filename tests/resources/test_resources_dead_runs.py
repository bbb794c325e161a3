"""Pool slots come back from runs whose process is gone, and from no other."""

from __future__ import annotations

import subprocess
import sys
import time

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent, EngineEventData
from dagster._core.test_utils import create_run_for_test

from resources.dead_runs import release_dead_runs

POOL = "gpu"


@pytest.fixture
def instance(tmp_path):
    with dg.instance_for_test(temp_dir=str(tmp_path)) as found:
        found.event_log_storage.set_concurrency_slots(POOL, 1)
        yield found


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def started_run(instance: dg.DagsterInstance, *pids: int) -> dg.DagsterRun:
    """A run that holds the pool's slot and whose events name these processes, its own first."""
    run = create_run_for_test(instance, job_name="job", status=dg.DagsterRunStatus.STARTED)
    for pid in pids:
        data = EngineEventData.multiprocess(pid)
        event = DagsterEvent("ENGINE_EVENT", "job", event_specific_data=data, message="a process")
        instance.report_dagster_event(event, run.run_id)
    assert instance.event_log_storage.claim_concurrency_slot(POOL, run.run_id, "step").is_claimed
    return run


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def slots_taken(instance: dg.DagsterInstance) -> int:
    return instance.event_log_storage.get_concurrency_info(POOL).active_slot_count


def test_a_run_whose_process_is_gone_fails_and_frees_its_slot(instance):
    run = started_run(instance, dead_pid())
    assert release_dead_runs(instance) == [run.run_id]
    assert slots_taken(instance) == 0
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
    assert release_dead_runs(instance) == []


def test_a_running_run_keeps_its_slot(instance, sleeper):
    run = started_run(instance, sleeper.pid, dead_pid())
    assert release_dead_runs(instance) == []
    assert slots_taken(instance) == 1
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED


def test_a_run_that_is_only_starting_keeps_its_slot(instance):
    started_run(instance)
    assert release_dead_runs(instance) == []
    assert slots_taken(instance) == 1


def test_a_slot_is_not_free_while_a_step_of_the_dead_run_lives(instance, sleeper):
    run = started_run(instance, dead_pid(), sleeper.pid)
    assert release_dead_runs(instance, wait_s=0.3) == []
    assert slots_taken(instance) == 1
    sleeper.kill()
    sleeper.wait()
    assert release_dead_runs(instance) == [run.run_id]


def test_a_pid_that_another_process_has_by_now_is_not_the_run(instance, sleeper, monkeypatch):
    run = started_run(instance, sleeper.pid)
    old = time.time() - 3600
    entries = [entry._replace(timestamp=old) for entry in instance.all_logs(run.run_id)]
    monkeypatch.setattr(type(instance), "all_logs", lambda *_, **__: entries)
    assert release_dead_runs(instance) == [run.run_id]


def test_a_finished_run_gives_back_what_it_still_holds(instance):
    run = started_run(instance)
    instance.report_run_failed(run, "over")
    assert release_dead_runs(instance) == [run.run_id]
    assert slots_taken(instance) == 0


def test_an_instance_without_a_store_on_this_machine_is_left_to_its_daemon():
    with dg.DagsterInstance.ephemeral() as instance:
        assert release_dead_runs(instance) == []
