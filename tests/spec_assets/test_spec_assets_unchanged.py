"""Exactly the steps whose results exist run in the run's process; other steps have a process, which ends with the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from processes import ending
from test_spec_assets_command_line import ROOT
from test_spec_assets_killed_run import commands_of, start
from waiting import wait_until

from draftworks.storage.file_lock import try_lock

JOB = ("job", "execute", "-j", "everything", "--tags", '{"dagster/partition": "small"}')
CONSOLE = ("-c", str(ROOT / "jobs" / "console.yaml"))


@pytest.fixture(scope="module")
def made(finished_site, tmp_path_factory) -> Any:
    """A site on which everything was made and found where it lies, with a Dagster home of its own."""
    site = finished_site.copy(tmp_path_factory.mktemp("unchanged"))
    home = site.root / "dagster_home"
    home.mkdir()
    shutil.copy(ROOT / ".dagster" / "dagster.yaml", home)
    assert site.run().success
    return site


def finish(site: Any, home: Path) -> subprocess.CompletedProcess:
    run = start(site, home, *JOB, *CONSOLE)
    with ending(run):
        return subprocess.CompletedProcess(run.args, run.wait())


def last_run(home: Path) -> tuple[dg.DagsterRun, list[dg.DagsterEvent]]:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        (run,) = instance.get_runs(limit=1)
        events = [log.dagster_event for log in instance.all_logs(run.run_id)]
    return run, [event for event in events if event is not None]


def steps(events: list[dg.DagsterEvent], kind: str) -> set[str]:
    return {str(event.step_key) for event in events if event.event_type_value == kind}


def home_of(site: Any) -> Path:
    return site.root / "dagster_home"


def test_a_run_that_finds_everything_made_begins_no_process(made):
    assert finish(made, home_of(made)).returncode == 0
    run, events = last_run(home_of(made))
    assert run.is_success
    assert steps(events, "STEP_WORKER_STARTING") == set()
    assert steps(events, "STEP_SUCCESS") >= {
        "target_model",
        "recipe",
        "eagle3_export",
        "eagle3_export_gates",
        "ranking.rank",
    }
    caches = {event.materialization.metadata["cache"].value for event in events if is_result(event)}
    assert caches == {"hit"}


def is_result(event: dg.DagsterEvent) -> bool:
    return event.event_type_value == "ASSET_MATERIALIZATION" and "cache" in event.materialization.metadata


def test_work_and_what_comes_after_it_has_processes_and_what_it_does_not_touch_has_none(made):
    damaged = next((made.var / "eagle3_export").rglob("model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert finish(made, home_of(made)).returncode == 0
    _, events = last_run(home_of(made))
    assert steps(events, "STEP_WORKER_STARTING") == {"eagle3_export", "eagle3_export_gates"}
    assert steps(events, "STEP_SUCCESS") > {"eagle3_draft", "eagle3_report", "eagle3_export_gates"}


@pytest.fixture
def entry(made) -> Iterator[dict[str, Any]]:
    """The target's entry as a mapping to change; the file is restored after the test."""
    text = made.target_file.read_text()
    changed = yaml.safe_load(text)
    yield changed
    made.target_file.write_text(text)


def finish_twice(site: Any, entry: dict[str, Any]) -> list[dg.DagsterEvent]:
    """Events of the second run; the first one examines the new entry, with processes for that step and all later ones."""
    site.target_file.write_text(yaml.safe_dump(entry))
    for _ in range(2):
        assert finish(site, home_of(site)).returncode == 1
    return last_run(home_of(site))[1]


@pytest.mark.long
def test_nothing_is_made_behind_a_gate_that_failed_in_the_process_of_the_run(made, entry):
    entry["gates"] = {"answers_finished": "error"}
    entry["responses"]["max_new_tokens"] = 16
    entry["strategies"]["eagle3"]["training"]["lr"] = 0.001
    events = finish_twice(made, entry)
    assert "responses" in steps(events, "STEP_FAILURE")
    assert steps(events, "STEP_WORKER_STARTING") == set()
    assert not steps(events, "STEP_START") & {"training_features", "eagle3_draft", "eagle3_report"}


@pytest.mark.long
def test_a_run_that_finds_everything_made_does_not_wait_for_a_pool(made):
    """Another run, whose process is not visible from here, holds the only slot."""
    with dg.DagsterInstance.from_config(str(home_of(made))) as instance:
        other = dg.DagsterRun("prepare", run_id=str(uuid.uuid4()), status=dg.DagsterRunStatus.STARTED)
        instance.add_run(other)
        storage = instance.event_log_storage
        storage.set_concurrency_slots("gpu", 1)
        assert storage.claim_concurrency_slot("gpu", other.run_id, "eagle3_draft").is_claimed
    try:
        assert finish(made, home_of(made)).returncode == 0
        assert steps(last_run(home_of(made))[1], "STEP_WORKER_STARTING") == set()
    finally:
        with dg.DagsterInstance.from_config(str(home_of(made))) as instance:
            instance.event_log_storage.free_concurrency_slots_for_run(other.run_id)
            instance.delete_run(other.run_id)


@pytest.fixture
def waiting(made) -> Iterator[subprocess.Popen]:
    """A run whose last step waits, in the run's own process, for a lock that another process holds."""
    before, _ = last_run(home_of(made))

    def waits() -> bool:
        run, events = last_run(home_of(made))
        return run.run_id != before.run_id and "ranking.rank" in steps(events, "STEP_START")

    with try_lock(made.var / "leaderboard" / ".lock"):
        run = start(made, home_of(made), *JOB, *CONSOLE)
        with ending(run):
            wait_until(waits, "the run's last step", possible=lambda: run.poll() is None)
            yield run


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_that_works_in_its_own_process(made, waiting, sent):
    waiting.send_signal(sent)
    assert waiting.wait() != 0
    run, _ = last_run(home_of(made))
    assert run.is_finished
    assert not run.is_success
    assert commands_of(home_of(made)) == []


def test_a_killed_run_that_worked_in_its_own_process_leaves_nothing(made, waiting):
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.wait()
    wait_until(lambda: commands_of(home_of(made)) == [], lambda: f"the end of {commands_of(home_of(made))}")
