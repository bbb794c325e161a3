"""Real Slurm under the contract of launchers."""

from __future__ import annotations

import json
import os
from typing import Any

from launcher_contract import LauncherHarness, make_job
from launcher_harnesses import find_processes
from waiting import wait_until

from draftworks.config.launchers import parse_launcher
from resources.scheduler import Scheduler, make_scheduler
from resources.scheduler_launcher import SchedulerLauncher
from resources.slurm_commands import SlurmCommands

COMMANDS = "DRAFTWORKS_TEST_SLURM"
"""Environment variable with the folder of the cluster's commands, for the Dagster processes that a test starts."""


class SlurmHarness(LauncherHarness):
    survives = True
    time_limit_s = 60.0
    grace_s = 10.0

    @property
    def commands(self) -> SlurmCommands:
        return SlurmCommands(os.environ[COMMANDS])

    @property
    def scheduler(self) -> Scheduler:
        return make_scheduler(parse_launcher(self.make_settings(), "launcher"))

    def make_settings(self, **keys: Any) -> dict[str, Any]:
        own = {"kind": "slurm", "grace_s": self.grace_s, "poll_interval_s": 0.2, "commands": self.commands.folder}
        return {**own, **keys}

    def make_launcher(self, **keys: Any) -> SchedulerLauncher:
        return SchedulerLauncher(settings=json.dumps(self.make_settings(**keys)), files_lag_s=0.3)

    def list_left(self) -> list[str]:
        left = [" ".join(process.cmdline()) for process in find_processes(self.folder)]
        return [each.id for each in self.scheduler.list()] + left

    def count_submitted(self) -> int:
        identity = make_job(self, "steps").identity
        assert identity is not None
        return len(self.commands.list_jobs(f"--name={identity.name}", "--states=all"))

    def preempt(self) -> None:
        (running,) = self.scheduler.list()
        script = self.folder / "urgent.sh"
        script.write_text("#!/bin/sh\n#SBATCH --partition=urgent --nodes=2 --exclusive --output=/dev/null\ntrue\n")
        self.commands.submit(script, {})
        wait_until(lambda: (seen := self.scheduler.look(running.id)) is None or seen.state.is_final)
        for up in self.work.glob("up.*"):  # of its last steps
            up.unlink()

    def clean_up(self) -> None:
        for each in self.scheduler.list():
            self.scheduler.end(each.id, 0.0)
        for process in find_processes(self.folder):
            process.kill()
