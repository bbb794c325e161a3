"""A Ray cluster for the contract of launchers. Its address is in the environment, for the processes that a test starts."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

from launcher_harnesses import LocalHarness, find_processes
from ray_cluster import RayCluster
from waiting import find_now, wait_until

from draftworks.config.launchers import RayLauncherSpec
from resources.ray_scheduler import RayScheduler
from resources.scheduler_launcher import SchedulerLauncher

ADDRESS = "DRAFTWORKS_TEST_RAY"


class RayHarness(LocalHarness):
    """Jobs run on the second node, which is killed where another scheduler would pre-empt."""

    survives = True
    time_limit_s = 15.0
    stall_limit_s = 10.0
    cluster: ClassVar[RayCluster]

    @classmethod
    def use(cls, cluster: RayCluster) -> None:
        cls.cluster = cluster
        os.environ[ADDRESS] = cluster.address

    @property
    def scheduler(self) -> RayScheduler:
        return RayScheduler(RayLauncherSpec(address=os.environ[ADDRESS]))

    def make_settings(self, **keys: Any) -> dict[str, Any]:
        own = {
            "address": os.environ[ADDRESS],
            "cpus_per_rank": 0.1,
            "resources": {"second": 0.1},
            "poll_interval_s": 0.3,
        }
        return {"kind": "ray", "grace_s": self.grace_s, **own, **keys}

    def make_launcher(self, **keys: Any) -> SchedulerLauncher:
        return SchedulerLauncher(settings=json.dumps(self.make_settings(**keys)), files_lag_s=1.0)

    def list_left(self) -> list[str]:
        return [each.id for each in self.scheduler.list()] + super().list_left()

    def count_submitted(self) -> int:
        return len(find_now(self.folder / "runs", "**/ray_job.json"))

    def preempt(self) -> None:
        self.cluster.kill_second_node()
        wait_until(lambda: not find_processes(self.folder))
        for up in self.work.glob("up.*"):  # of steps that were done after the test had seen the ranks at work
            up.unlink()
        self.cluster.add_second_node()

    def clean_up(self) -> None:
        for each in self.scheduler.list():
            self.scheduler.end(each.id, 0.0)
        super().clean_up()
