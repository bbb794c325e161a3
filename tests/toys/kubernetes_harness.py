"""The Kubernetes launcher on the fake cluster, for the contract of launchers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from fake_kubelet import FakeCluster
from fake_kubernetes import PODS, TRAINJOBS, write_kubeconfig
from launcher_contract import LauncherHarness
from launcher_harnesses import find_processes

from resources.kubernetes_state import has_ended
from resources.scheduler_launcher import SchedulerLauncher


class KubernetesHarness(LauncherHarness):
    """Another process that makes one of the same folder is a client of the cluster that `running` has started."""

    survives = True
    time_limit_s = 15.0
    cluster: FakeCluster

    @contextmanager
    def running(self) -> Iterator[KubernetesHarness]:
        pods = self.folder / "pods"
        pods.mkdir()
        self.cluster = FakeCluster(pods)
        self.cluster.claims["shared"] = self.folder
        with self.cluster.running() as address:
            write_kubeconfig(self.folder / "kubeconfig", address)
            yield self

    def make_settings(self, **keys: Any) -> dict[str, Any]:
        return {
            "kind": "kubernetes",
            "image": "draftworks:1",
            "kubeconfig": str(self.folder / "kubeconfig"),
            "volumes": {str(self.folder): "shared"},
            "python": sys.executable,
            "queue": "research",
            "grace_s": self.grace_s,
            "poll_interval_s": 0.1,
            **keys,
        }

    def make_launcher(self, **keys: Any) -> SchedulerLauncher:
        return SchedulerLauncher(settings=json.dumps(self.make_settings(**keys)), files_lag_s=0.3)

    def list_left(self) -> list[str]:
        alive = [job["metadata"]["name"] for job in self.cluster.store.list(TRAINJOBS) if not has_ended(job)]
        running = [
            pod["metadata"]["name"] for pod in self.cluster.store.list(PODS) if pod["status"]["phase"] == "Running"
        ]
        return alive + running + [f"process {each.pid}" for each in find_processes(self.folder)]

    def count_submitted(self) -> int:
        events = self.cluster.store.events
        return sum(event.plural == TRAINJOBS and event.kind == "ADDED" for event in events)

    def preempt(self) -> None:
        self.cluster.drain_node()

    def suspend(self) -> None:
        """Let Kueue take the running job's place in the cluster away."""
        (name,) = [job["metadata"]["name"] for job in self.cluster.store.list(TRAINJOBS)]
        self.cluster.pre_empted.add(name)

    def resume(self) -> None:
        self.cluster.pre_empted.clear()

    def clean_up(self) -> None:
        for process in find_processes(self.folder):
            with suppress(psutil.Error):
                process.kill()
