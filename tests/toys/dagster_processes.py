"""Webserver, daemon and code location as three processes, started by the units of `deploy/` on a location of a test's own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import psutil
import waiting
from deploy_toys import CHECKOUT, DEPLOY, read_environment, read_unit
from ports import reserve_port
from waiting import HANG_S

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
