"""Dagster as a team runs it: Postgres, webserver, daemon and code location, each of which may end and come again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster_processes import DAEMON, WEBSERVER, Processes, dagster_processes, open_instance
from postgres_server import PostgresServer, postgres_server

pytestmark = pytest.mark.cluster
LOCATION = '''
import os, time
from pathlib import Path
import dagster as dg
from draftworks.targets.registry import Registry
from spec_assets.common import asset
from spec_assets.executor import make_executor

HERE = Path(__file__).parent

@asset(group="work", kinds=["python"], pool="gpu", partitions_def=dg.StaticPartitionsDefinition(["one", "two"]))
def work(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Begins, and ends when it is told to."""
    (HERE / f"began-{context.run_id}").touch()
    while not (HERE / f"end-{context.run_id}").exists():
        time.sleep(0.05)
    return dg.MaterializeResult(metadata={"target": context.partition_key})

defs = dg.Definitions(
    assets=[work],
    jobs=[dg.define_asset_job("make", selection=[work])],
    executor=make_executor(Registry(HERE / "registry"), preload=["spec_assets.common"]),
)
'''


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("location")
    (folder / "registry" / "targets").mkdir(parents=True)
    for target in ("one", "two"):
        (folder / "registry" / "targets" / f"{target}.yaml").write_text("model: /nowhere\ndataset: chats\n")
    (folder / "location.py").write_text(LOCATION)
    return folder / "location.py"


@pytest.fixture(scope="module")
def processes(postgres, location, tmp_path_factory) -> Iterator[Processes]:
    with dagster_processes(tmp_path_factory.mktemp("deployment"), location, postgres.variables) as started:
        yield started


@pytest.fixture
def instance(processes, monkeypatch) -> Iterator[dg.DagsterInstance]:
    for name, value in processes.environment.items():
        monkeypatch.setenv(name, value)
    with open_instance(processes) as opened:
        yield opened


class Work:
    """The runs of the location's job: which began, and their end."""

    def __init__(self, processes: Processes, instance: dg.DagsterInstance, location: Path) -> None:
        self.processes, self.instance, self.folder = processes, instance, location.parent

    def launch(self, target: str) -> str:
        return self.processes.launch("make", target)

    def has_begun(self, run_id: str) -> bool:
        return (self.folder / f"began-{run_id}").exists()

    def let_end(self, run_id: str) -> None:
        (self.folder / f"end-{run_id}").touch()

    def status(self, run_id: str) -> str:
        return self.instance.get_run_by_id(run_id).status.value

    def wait_for(self, status: str, *run_ids: str) -> None:
        self.processes.wait_until(lambda: {self.status(run_id) for run_id in run_ids} == {status})


@pytest.fixture
def work(processes, instance, location) -> Work:
    return Work(processes, instance, location)


def test_runs_survive_a_restart_of_webserver_and_daemon_and_wait_for_their_pool(work):
    """Two queued runs: the daemon starts both, one waits for the pool's only place, and neither needs the daemon or the
    webserver any more."""
    processes = work.processes
    runs = [work.launch("one"), work.launch("two")]
    processes.wait_until(lambda: any(map(work.has_begun, runs)))
    processes.wait_until(lambda: pool_of(work.instance).pending_step_count == 1)
    assert sum(map(work.has_begun, runs)) == 1
    assert pool_of(work.instance).active_slot_count == 1
    work.wait_for("STARTED", *runs)

    processes.end(WEBSERVER, DAEMON)
    first, second = sorted(runs, key=work.has_begun, reverse=True)
    work.let_end(first)
    work.wait_for("SUCCESS", first)
    processes.wait_until(lambda: work.has_begun(second))

    processes.start(WEBSERVER, DAEMON)
    assert [processes.read_status(run) for run in (first, second)] == ["SUCCESS", "STARTED"]
    work.let_end(second)
    work.wait_for("SUCCESS", second)
    third = work.launch("one")
    work.let_end(third)
    work.wait_for("SUCCESS", third)
    made = work.instance.get_materialized_partitions(dg.AssetKey("work"))
    assert made == {"one", "two"}
    assert pool_of(work.instance).active_slot_count == 0


def pool_of(instance: dg.DagsterInstance):
    return instance.event_log_storage.get_concurrency_info("gpu")
