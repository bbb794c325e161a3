"""Dagster as a team runs it: Postgres, webserver, daemon and code location, each of which may end and come again."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import psutil
import pytest
import waiting
from deploy_toys import CHECKOUT, DEPLOY, read_environment, read_unit
from ports import reserve_port
from postgres_server import PostgresServer, postgres_server
from processes import lives
from waiting import HANG_S

from resources.dead_runs import TAG
from resources.process_tree import RunProcess

CODE, WEBSERVER, DAEMON = "code", "webserver", "daemon"
VARIABLE = re.compile(r"\$\{(\w+)\}")
STOP_S = 300.0
DEFINITIONS = "spec_assets/definitions.py"
LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
  }
}
"""
RELOAD = 'mutation { reloadRepositoryLocation(repositoryLocationName: "draftworks") { __typename } }'


@dataclass
class Processes:
    """The three processes of a deployment, each of which can be ended and started again.

    Attributes:
        folder: DAGSTER_HOME, logs and compute logs.
        location: the file with the definitions.
    """

    folder: Path
    location: Path
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path, location: Path, variables: dict[str, str]) -> Processes:
        home = folder / "home"
        home.mkdir()
        (home / "dagster.yaml").symlink_to(DEPLOY / "dagster.yaml")
        ports = {name: str(reserve_port()) for name in ("DRAFTWORKS_CODE_PORT", "DRAFTWORKS_UI_PORT")}
        folders = {"DAGSTER_HOME": str(home), "DRAFTWORKS_COMPUTE_LOGS": str(folder / "compute_logs")}
        return cls(folder, location, {**os.environ, **read_environment(), **variables, **ports, **folders})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['DRAFTWORKS_UI_PORT']}"

    def start(self, *names: str) -> None:
        for name in names:
            words = [VARIABLE.sub(lambda match: self.environment[match[1]], word) for word in self._read_command(name)]
            with (self.folder / f"{name}.log").open("ab") as log:
                self.running[name] = subprocess.Popen(
                    words,
                    cwd=CHECKOUT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            if name == CODE:
                self.wait_until(lambda: is_listening(int(self.environment["DRAFTWORKS_CODE_PORT"])))
        if WEBSERVER in names:
            self.wait_until(self._has_loaded)

    def end(self, *names: str) -> None:
        """End them as systemd does: SIGTERM to all processes of the unit, and later SIGKILL to what is left."""
        for name in names:
            main = self.running.pop(name)
            unit = [psutil.Process(main.pid)] if main.poll() is None else []
            unit += [child for process in unit for child in process.children(recursive=True)]
            for process in unit:
                with suppress(psutil.Error):
                    process.terminate()
            for process in psutil.wait_procs(unit, STOP_S)[1]:
                process.kill()
            main.wait()

    def ask(self, query: str, **variables: Any) -> dict[str, Any] | None:
        """Return the answer of the webserver's GraphQL interface; None if the request failed."""
        return httpx.post(f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=HANG_S).json()[
            "data"
        ]

    def launch(self, job: str, target: str) -> str:
        """Launch a job for a target as the UI does: the run is queued. Returns its id.

        Repeated as a person would: after an outage some requests fail.
        """
        params = {
            "selector": {
                "repositoryLocationName": "draftworks",
                "repositoryName": "__repository__",
                "jobName": job,
            },
            "runConfigData": {},
            "executionMetadata": {"tags": [{"key": "dagster/partition", "value": target}]},
        }
        launched: list[str] = []

        def has_launched() -> bool:
            answer = self.ask(LAUNCH, params=params)
            run = (answer or {}).get("launchRun", {}).get("run")
            launched.extend([run["runId"]] if run else [])
            return bool(launched)

        self.wait_until(has_launched)
        return launched[0]

    def reload(self) -> None:
        """Load the code location again, as the UI does."""
        answer = self.ask(RELOAD)
        assert answer == {"reloadRepositoryLocation": {"__typename": "WorkspaceLocationEntry"}}, answer

    def read_status(self, run_id: str) -> str | None:
        """Return what the webserver says of a run; None if it fails."""
        answer = self.ask("query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id)
        return (answer or {"runOrError": {}})["runOrError"].get("status")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        waiting.wait_until(condition, self.read_logs, possible=self._are_running)

    def _are_running(self) -> bool:
        return all(process.poll() is None for process in self.running.values())

    def read_logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def list_left(self) -> list[psutil.Process]:
        """Return all living processes with this deployment's DAGSTER_HOME, such as runs and their steps."""
        found = []
        for process in psutil.process_iter(["environ", "status"]):
            mine = (process.info["environ"] or {}).get("DAGSTER_HOME") == self.environment["DAGSTER_HOME"]
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
        return found

    def _read_command(self, name: str) -> list[str]:
        words = read_unit(f"draftworks-{name}.service").command
        own = {DEFINITIONS: str(self.location), "deploy/workspace.yaml": str(DEPLOY / "workspace.yaml")}
        return [own.get(word, word.replace("/opt/draftworks", str(CHECKOUT))) for word in words]

    def _has_loaded(self) -> bool:
        query = "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus } } } }"
        try:
            answer = self.ask(query)
        except httpx.HTTPError:
            return False
        entries = (answer or {"workspaceOrError": {"locationEntries": []}})["workspaceOrError"]["locationEntries"]
        return [entry["loadStatus"] for entry in entries] == ["LOADED"]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def dagster_processes(folder: Path, location: Path, variables: dict[str, str]) -> Iterator[Processes]:
    """The three processes, started; nothing of them or their runs is left at the end."""
    processes = Processes.create(folder, location, variables)
    try:
        processes.start(CODE, WEBSERVER, DAEMON)
        yield processes
    finally:
        processes.end(*processes.running)
        for process in processes.list_left():
            with suppress(psutil.Error):
                process.kill()


@contextmanager
def open_instance(processes: Processes) -> Iterator[dg.DagsterInstance]:
    """The deployment's instance, in this process; its variables must be set."""
    with dg.DagsterInstance.from_config(processes.environment["DAGSTER_HOME"]) as instance:
        yield instance


pytestmark = pytest.mark.cluster
TRIED_AGAIN_S = 8.0
"""Less than the seconds for which Dagster tries to connect to its database again."""
LOCATION = '''
import time
from pathlib import Path
import dagster as dg
from draftworks.targets.registry import Registry
from resources.dead_runs import release_dead_runs
from spec_assets.common import asset
from spec_assets.executor import make_executor

HERE = Path(__file__).parent
TARGETS = dg.StaticPartitionsDefinition(["one", "two"])

@asset(group="work", kinds=["python"], partitions_def=TARGETS)
def beginning(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Releases dead runs, as the first asset of every job does."""
    release_dead_runs(context.instance)
    return dg.MaterializeResult()

@asset(group="work", kinds=["python"], partitions_def=TARGETS, pool="gpu", deps=[beginning])
def work(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Begins, and ends when it is told to."""
    (HERE / f"began-{context.run_id}").touch()
    while not (HERE / f"end-{context.run_id}").exists():
        time.sleep(0.05)
    return dg.MaterializeResult(metadata={"target": context.partition_key})

defs = dg.Definitions(
    assets=[beginning, work],
    jobs=[dg.define_asset_job("make", selection=[beginning, work])],
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

    def wait_for_end(self, run_id: str) -> None:
        self.processes.wait_until(lambda: self.status(run_id) in ("SUCCESS", "FAILURE"))

    def begin(self, target: str) -> str:
        """Launch it, and return when its step is at work."""
        run_id = self.launch(target)
        self.processes.wait_until(lambda: self.has_begun(run_id))
        return run_id

    def run_another(self) -> None:
        """A run begins and ends well, and leaves its place in the pool to the next."""
        run_id = self.begin("one")
        self.let_end(run_id)
        self.wait_for("SUCCESS", run_id)
        assert self.pool.active_slot_count == 0

    def find_process(self, run_id: str) -> psutil.Process:
        """Return the run's process, by the tag that its first step has made."""
        tag = self.instance.get_run_by_id(run_id).tags[TAG]
        return psutil.Process(RunProcess.from_tag(run_id, tag).pid)

    def read_messages(self, run_id: str) -> str:
        return "\n".join(entry.user_message for entry in self.instance.all_logs(run_id))

    def read_errors(self, run_id: str) -> str:
        events = [entry.dagster_event for entry in self.instance.all_logs(run_id)]
        found = [getattr(event.event_specific_data, "error", None) for event in events if event is not None]
        return "\n".join(str(error) for error in found if error is not None)

    @property
    def pool(self):
        return self.instance.event_log_storage.get_concurrency_info("gpu")


@pytest.fixture
def work(processes, instance, location) -> Work:
    return Work(processes, instance, location)


def test_runs_survive_a_restart_of_webserver_and_daemon_and_wait_for_their_pool(work):
    """Two queued runs: the daemon starts both, one waits for the pool's only place, and neither needs the daemon or the
    webserver any more."""
    processes = work.processes
    runs = [work.launch("one"), work.launch("two")]
    processes.wait_until(lambda: any(map(work.has_begun, runs)))
    processes.wait_until(lambda: work.pool.pending_step_count == 1)
    assert sum(map(work.has_begun, runs)) == work.pool.active_slot_count == 1
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
    assert work.instance.get_materialized_partitions(dg.AssetKey("work")) == {"one", "two"}


def test_a_run_goes_on_while_the_code_location_is_loaded_again(work):
    run = work.begin("one")
    work.processes.reload()
    work.let_end(run)
    work.wait_for("SUCCESS", run)


def test_a_run_does_not_notice_that_postgres_was_killed_and_came_back_in_seconds(work, postgres):
    """Connections are tried again for about ten seconds, also while the step reports its end."""
    away_s = TRIED_AGAIN_S
    while away_s >= TRIED_AGAIN_S:  # on a busy machine Postgres may take longer to come back
        run = work.begin("one")
        began = time.monotonic()
        postgres.kill()
        work.let_end(run)
        time.sleep(3)
        postgres.start()
        away_s = time.monotonic() - began
        work.wait_for_end(run)
    assert work.status(run) == "SUCCESS"
    made = work.instance.all_logs(run, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
    assert len(made) == 2


@pytest.mark.long
def test_a_run_fails_when_postgres_stays_away_and_the_next_one_gets_its_place(work, postgres):
    run = work.begin("two")
    process = work.find_process(run)
    postgres.kill()
    work.let_end(run)
    work.processes.wait_until(lambda: not lives(process))
    postgres.start()
    work.wait_for("FAILURE", run)
    work.run_another()


def test_a_stop_of_the_code_location_interrupts_its_runs_and_the_next_start_takes_others(work):
    run = work.begin("one")
    process = work.find_process(run)
    work.processes.end(CODE)
    work.wait_for("FAILURE", run)
    assert not lives(process)
    assert "Run the same job again: it continues from there." in work.read_messages(run), work.read_errors(run)
    work.processes.start(CODE)
    work.run_another()
