"""Re-evaluation under a real `dagster-daemon`: it starts one run for the one target that changed, and no second."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import InstigatorState
from fleets import Fleet
from waiting import wait_until

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
