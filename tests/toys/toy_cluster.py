"""A site whose jobs run in a toy scheduler, and the Dagster runs on it that a test kills, cancels and repeats."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import yaml
from toy_scheduler import ToyScheduler, offer_toy
from waiting import find_now, wait_until

from resources.job_claims import JobClaim

TOYS = Path(__file__).parent
SHOWN_AGAIN_S = 2.0
"""More than the last messages before the death of a reader, which its successor shows again."""
ROOT = TOYS.parents[1]
LOCATION = """
from pathlib import Path
from toy_scheduler import offer_toy
from spec_assets.code_location import build_definitions
offer_toy()
defs = build_definitions(Path(__file__).parent / "registry")
"""


@dataclass(frozen=True)
class ToyCluster:
    """A copy of a site with a scheduler and a Dagster home of its own.

    Attributes:
        started: the processes of runs.
    """

    site: Any
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def create(cls, site: Any, **launcher: Any) -> ToyCluster:
        offer_toy()
        cluster = cls(site)
        cluster.scheduler.root.mkdir()
        cluster.home.mkdir()
        shutil.copy(ROOT / ".dagster" / "dagster.yaml", cluster.home)
        settings = {"kind": "toy", "root": str(cluster.scheduler.root), "poll_interval_s": 0.05, "grace_s": 30}
        (site.registry / "deployment.yaml").write_text(yaml.safe_dump({"launcher": {**settings, **launcher}}))
        cluster.location.write_text(LOCATION)
        return cluster

    @property
    def scheduler(self) -> ToyScheduler:
        return ToyScheduler(self.site.root / "toy")

    @property
    def home(self) -> Path:
        return self.site.root / "dagster_home"

    @property
    def location(self) -> Path:
        return self.site.root / "location.py"

    @property
    def log(self) -> Path:
        return self.site.root / "runs.log"

    def start(self, *assets: str, **config: Any) -> subprocess.Popen[bytes]:
        """Start a run from the command line that makes assets, with the configuration of each that has one."""
        ops = {"ops": {name: {"config": each} for name, each in config.items()}}
        command = [str(Path(sys.executable).with_name("dagster")), "asset", "materialize", "-f", str(self.location)]
        command += ["--select", ",".join(assets), "--partition", "small", "--config-json", json.dumps(ops)]
        path = os.pathsep.join([str(TOYS), str(ROOT)])
        environment = {**os.environ, "DAGSTER_HOME": str(self.home), "PYTHONPATH": path}
        with self.log.open("ab") as log:
            run = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        self.started.append(run)
        return run

    @contextmanager
    def open_instance(self) -> Iterator[dg.DagsterInstance]:
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            yield instance

    def find_claim(self, asset: str, role: str = "") -> JobClaim | None:
        """Return the claim of an asset's submitted job, or of one that runs beside it."""
        made = f"small/{asset}/{role}" if role else f"small/{asset}"
        claims = [JobClaim.read(path) for path in find_now(self.site.var, "**/*job.json")]
        found = [each for each in claims if each is not None and each.made == made and each.job_id is not None]
        return found[0] if found else None

    def require_claim(self, asset: str, role: str = "") -> JobClaim:
        claim = self.find_claim(asset, role)
        assert claim is not None, self.log.read_text()
        return claim

    def find_ranks(self, program: str) -> list[psutil.Process]:
        """Return the processes of a program on this site's run files, whoever started them."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                if f"draftworks.programs.{program}" in words and str(self.site.root) in words[-1]:
                    found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        return found

    def kill_run(self, run: subprocess.Popen[bytes], asset: str) -> None:
        """Kill the process of a run as the kernel does when memory is short; return when its step has ended too."""
        owner = self.require_claim(asset).owner
        time.sleep(SHOWN_AGAIN_S)  # what the run has shown in its last second would be shown again
        run.kill()
        run.wait()
        wait_until(lambda: bool(owner.is_dead()))

    def read_lines(self, *runs: str) -> list[str]:
        """Return the log lines of runs, in the order of the runs."""
        with self.open_instance() as instance:
            return [entry.user_message for run_id in runs for entry in instance.all_logs(run_id)]

    def list_runs(self) -> list[dg.DagsterRun]:
        """Return all runs, the oldest first."""
        with self.open_instance() as instance:
            return list(reversed(instance.get_runs()))

    def list_left(self) -> list[str]:
        """Return jobs that live, slots that are taken, and files that only living jobs have."""
        with self.open_instance() as instance:
            held = instance.event_log_storage.get_concurrency_run_ids()
        files = [path for path in self.site.var.rglob("*") if path.name.endswith(("job.json", ".tmp"))]
        return [*(each.id for each in self.scheduler.list()), *held, *map(str, files)]

    def clean_up(self) -> None:
        for run in self.started:
            run.kill()
            run.wait()
        for each in self.scheduler.list():
            self.scheduler.end(each.id, 0.0)


@contextmanager
def pausing(processes: Callable[[], list[psutil.Process]]) -> Iterator[list[psutil.Process]]:
    """Let processes stand still in the block, so that what the block does comes in the middle of their work."""
    found = processes()
    for each in found:
        each.send_signal(signal.SIGSTOP)
    try:
        yield found
    finally:
        for each in found:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGCONT)
