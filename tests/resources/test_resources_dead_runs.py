"""Pool slots are released for runs whose process has ended, and for no others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import dagster as dg
import psutil
import pytest
from dagster._core.events import DagsterEvent, EngineEventData
from dagster._core.storage.tags import TagType, get_tag_type
from dagster._core.test_utils import create_run_for_test

from resources.dead_runs import TAG, DeadRuns, end_with_run_process, find_run_process, release_dead_runs
from resources.process_tree import Place, RunProcess

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


def tagged(instance: dg.DagsterInstance, run: dg.DagsterRun, pid: int, **changes) -> None:
    """Tag the run as its first step does, with `changes` of the process or its place."""
    process = RunProcess(run.run_id, pid, 1.0, Place.here())
    with suppress(psutil.Error):
        process = RunProcess.of(run.run_id, pid)
    of_place = {name: changes.pop(name) for name in ("host", "boot", "namespace") if name in changes}
    process = replace(process, place=replace(process.place, **of_place), **changes)
    instance.add_run_tags(run.run_id, {TAG: process.to_tag()})


def started_run(instance: dg.DagsterInstance, *pids: int, **changes) -> dg.DagsterRun:
    """A run that holds the pool's slot, and whose tag and events name these processes, its own first."""
    run = create_run_for_test(instance, job_name="job", status=dg.DagsterRunStatus.STARTED)
    for pid in pids:
        data = EngineEventData.multiprocess(pid)
        event = DagsterEvent("ENGINE_EVENT", "job", event_specific_data=data, message="a process")
        instance.report_dagster_event(event, run.run_id)
    if pids:
        tagged(instance, run, pids[0], **changes)
    assert instance.event_log_storage.claim_concurrency_slot(POOL, run.run_id, "step").is_claimed
    return run


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def slots_taken(instance: dg.DagsterInstance) -> int:
    return instance.event_log_storage.get_concurrency_info(POOL).active_slot_count


def test_the_tag_of_a_process_is_not_shown_in_the_ui_and_that_of_older_runs_is_read():
    run, mine = dg.DagsterRun("everything", run_id="one"), RunProcess.of("one", os.getpid())
    assert get_tag_type(TAG) is TagType.HIDDEN
    assert find_run_process(run) is None
    for tag in (TAG, "draftworks/run_process"):
        assert find_run_process(run.with_tags({tag: mine.to_tag()})) == mine


def test_a_run_whose_process_is_gone_fails_and_frees_its_slot(instance):
    run = started_run(instance, dead_pid())
    assert release_dead_runs(instance) == DeadRuns(released=(run.run_id,))
    assert slots_taken(instance) == 0
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
    assert release_dead_runs(instance) == DeadRuns()


def test_a_running_run_keeps_its_slot(instance, sleeper):
    run = started_run(instance, sleeper.pid, dead_pid())
    assert release_dead_runs(instance) == DeadRuns()
    assert slots_taken(instance) == 1
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED


def test_a_run_that_has_not_said_where_it_runs_keeps_its_slot(instance):
    run = started_run(instance)
    assert release_dead_runs(instance) == DeadRuns(unknown=(run.run_id,))
    assert slots_taken(instance) == 1


@pytest.mark.parametrize(
    "elsewhere",
    [{"namespace": "pid:[4026532999]"}, {"boot": "another", "namespace": "pid:[4026532999]"}, {"host": "another"}],
)
def test_a_run_of_another_machine_or_container_keeps_its_slot(instance, elsewhere):
    run = started_run(instance, dead_pid(), **elsewhere)
    assert release_dead_runs(instance) == DeadRuns(unknown=(run.run_id,))
    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED
    assert slots_taken(instance) == 1


def test_only_a_machine_that_was_started_again_has_none_of_its_processes_left():
    old = Place("host", "id", "boot 1", "pid:[4026531836]")
    assert old.is_before_restart_of(replace(old, boot="boot 2"))
    assert not old.is_before_restart_of(old)
    for other in ({"host": "h"}, {"machine": "m"}, {"namespace": "pid:[1]"}):
        assert not old.is_before_restart_of(replace(old, boot="boot 2", **other))
    nameless, container = replace(old, machine=""), replace(old, namespace="pid:[1]")
    assert not nameless.is_before_restart_of(replace(nameless, boot="boot 2"))
    assert not container.is_before_restart_of(replace(container, boot="boot 2"))


def test_the_retry_of_a_dead_run_is_not_dead_because_it_has_its_tags(instance):
    run = started_run(instance, dead_pid(), run_id="the run that it retries")
    assert release_dead_runs(instance) == DeadRuns(unknown=(run.run_id,))


def test_a_slot_is_not_free_while_a_step_of_the_dead_run_lives(instance, sleeper):
    run = started_run(instance, dead_pid(), sleeper.pid)
    assert release_dead_runs(instance, wait_s=0.3) == DeadRuns()
    assert slots_taken(instance) == 1
    sleeper.kill()
    sleeper.wait()
    assert release_dead_runs(instance) == DeadRuns(released=(run.run_id,))


def test_a_pid_that_another_process_has_by_now_is_not_the_run(instance, sleeper, monkeypatch):
    run = started_run(instance, sleeper.pid, started=1.0)
    old = time.time() - 3600
    entries = [entry._replace(timestamp=old) for entry in instance.all_logs(run.run_id)]
    monkeypatch.setattr(type(instance), "all_logs", lambda *_, **__: entries)
    assert release_dead_runs(instance) == DeadRuns(released=(run.run_id,))


def test_a_finished_run_gives_back_what_it_still_holds(instance):
    run = started_run(instance)
    instance.report_run_failed(run, "over")
    assert release_dead_runs(instance) == DeadRuns(released=(run.run_id,))
    assert slots_taken(instance) == 0


def test_any_storage_with_pools_will_do(tmp_path):
    consolidated = {"module": "dagster.core.storage.event_log", "class": "ConsolidatedSqliteEventLogStorage"}
    overrides = {"event_log_storage": {**consolidated, "config": {"base_dir": str(tmp_path)}}}
    with dg.instance_for_test(overrides=overrides) as instance:
        instance.event_log_storage.set_concurrency_slots(POOL, 1)
        run = started_run(instance, dead_pid())
        assert release_dead_runs(instance) == DeadRuns(released=(run.run_id,))
        assert slots_taken(instance) == 0


def test_a_run_is_tagged_with_its_process_by_its_first_step(instance):
    @dg.asset
    def one(context) -> None:
        end_with_run_process(context)

    result = dg.materialize([one], instance=instance)
    run = instance.get_run_by_id(result.run_id)
    assert RunProcess.from_tag(run.run_id, run.tags[TAG]) == RunProcess.of(run.run_id, os.getpid())
    assert RunProcess.from_tag("its retry", run.tags[TAG]) is None


CAN_UNSHARE = (
    sys.platform == "linux" and subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode == 0
)


@pytest.mark.skipif(not CAN_UNSHARE, reason="needs the right to make a pid namespace")
def test_a_live_run_is_not_dead_for_a_container_that_shares_the_store(tmp_path, sleeper):
    code = """
import sys, dagster as dg
from resources.dead_runs import TAG, DeadRuns, end_with_run_process, release_dead_runs
from resources.process_tree import Place, RunProcess
with dg.DagsterInstance.local_temp(sys.argv[1]) as instance:
    print(release_dead_runs(instance))
"""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.event_log_storage.set_concurrency_slots(POOL, 1)
        run = started_run(instance, sleeper.pid)
        seen = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert seen.stdout.strip() == str(DeadRuns(unknown=(run.run_id,)))
        assert slots_taken(instance) == 1
        assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED


def test_a_storage_without_pools_has_nothing_to_release():
    with dg.DagsterInstance.ephemeral() as instance:
        assert release_dead_runs(instance) == DeadRuns()
