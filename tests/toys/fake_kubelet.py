"""Runs the pods of a fake Kubernetes as processes of this machine, as Trainer's controllers and kubelets would.

A container is a process group that ends with its first process. Images and limits are not there; a volume's claim is a
folder, and a path below a mount is replaced by the claim's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import yaml
from fake_kubernetes import PODS, RUNTIMES, TRAINJOBS, FakeKubernetes, Object, now, serve
from ports import reserve_port

from resources.process_tree import MARK, ProcessTree, is_alive

RUNTIME = Path(__file__).parents[2] / "deploy" / "kubernetes" / "training-runtime.yaml"
WORKERS_RUNTIME = RUNTIME.with_name("workers-runtime.yaml")
_TICK_S = 0.02


@dataclass
class _Container:
    """A pod's running process; `kill_at` is set when it was asked to end."""

    process: subprocess.Popen[bytes]
    tree: ProcessTree
    output: Path
    folder: Path
    kill_at: float | None = None


class FakeCluster(FakeKubernetes):
    """A fake server whose TrainJobs run.

    Attributes:
        claims: folder of each volume claim.
        images: images that can be pulled; None for all.
        free_nodes: how many pods can be scheduled at a time.
        pre_empted: names of TrainJobs that Kueue keeps suspended.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.claims: dict[str, Path] = {}
        self.images: set[str] | None = None
        self.free_nodes = 100
        self.pre_empted: set[str] = set()
        self.pod_manifests: list[Object] = []
        self._folder = folder
        self._containers: dict[str, _Container] = {}
        self._ports: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-controllers", daemon=True)
        for file in (RUNTIME, WORKERS_RUNTIME):
            self.store.write(RUNTIMES, yaml.safe_load(file.read_text()), "ADDED")

    def delete_pod(self, index: int = 0) -> None:
        """Delete a pod as a person with kubectl does."""
        pod = sorted(self.store.list(PODS), key=lambda pod: pod["metadata"]["name"])[index]
        self.mark_deleted(PODS, pod)

    def drain_node(self, index: int = 0) -> None:
        """Evict a pod, as when its node is taken away."""
        pod = sorted(self.store.list(PODS), key=lambda pod: pod["metadata"]["name"])[index]
        condition = {"reason": "DeletionByTaintManager", "message": "Taint manager: deleting due to NoExecute taint"}
        pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", **condition}]
        self.mark_deleted(PODS, pod)

    def list_processes(self) -> list[psutil.Process]:
        """Return the living processes of all pods."""
        found = []
        for container in tuple(self._containers.values()):  # the controllers change it meanwhile
            with suppress(psutil.Error):
                first = psutil.Process(container.process.pid)
                found += [process for process in (first, *first.children(recursive=True)) if is_alive(process)]
        return found

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve and run until the end of the context; yields the server's address."""
        with serve(self) as address:
            self._thread.start()
            try:
                yield address
            finally:
                self._over.set()
                self._thread.join()
                for container in self._containers.values():
                    container.tree.kill()

    def _run(self) -> None:
        while not self._over.wait(_TICK_S):
            for pod in self.store.list(PODS):
                self._tend_pod(pod)
            for job in self.store.list(TRAINJOBS):
                self._reconcile(job)

    def _reconcile(self, job: Object) -> None:
        """Do what the controllers of TrainJob, JobSet, Job and Kueue do, in one step."""
        name = job["metadata"]["name"]
        pods = [pod for pod in self.store.list(PODS) if pod["metadata"]["labels"][JOBSET] == name]
        if "deletionTimestamp" in job["metadata"]:
            self._delete_all(pods)
            if not pods:
                self.store.write(TRAINJOBS, job, "DELETED")
            return
        if (name in self.pre_empted) != job["spec"]["suspend"]:
            job["spec"]["suspend"] = name in self.pre_empted
            reason = "Suspended" if job["spec"]["suspend"] else "Resumed"
            self._set_condition(job, "Suspended", job["spec"]["suspend"], reason, f"TrainJob is {reason.lower()}")
            return
        if any(each["type"] in ("Complete", "Failed") for each in job.get("status", {}).get("conditions", ())):
            self._delete_all(pod for pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed"))
            return
        if job["spec"]["suspend"]:
            self._delete_all(pods)
        elif not pods and not job.get("status", {}).get("begun"):
            job.setdefault("status", {})["begun"] = True  # not in the real one: it asks its JobSet
            self.store.write(TRAINJOBS, job)
            for index in range(job["spec"]["trainer"]["numNodes"]):
                self._create_pod(job, index)
        else:
            self._judge(job, pods)

    def _judge(self, job: Object, pods: list[Object]) -> None:
        expected = job["spec"]["trainer"]["numNodes"]
        seconds = job["spec"].get("activeDeadlineSeconds")
        if seconds is not None and time.time() - self._read_time(job["metadata"]["creationTimestamp"]) > seconds:
            self._delete_all(pods)
            self._set_condition(job, "Failed", True, "DeadlineExceeded", "TrainJob ran longer than its deadline")
        elif (limit := self._read_job(job).get("backoffLimitPerIndex")) is not None:
            self._judge_indexes(job, pods, limit)
        elif len(pods) < expected or any(pod["status"]["phase"] == "Failed" for pod in pods):
            name = job["metadata"]["name"]
            message = f"jobset failed due to one or more job failures (first failed job: {name}-node-0)"
            self._set_condition(job, "Failed", True, "FailedJobs", message)
        elif all(pod["status"]["phase"] == "Succeeded" for pod in pods):
            self._set_condition(job, "Complete", True, "AllJobsCompleted", "jobset completed successfully")

    def _read_job(self, job: Object) -> Object:
        """Return what a TrainJob's runtime says of the Job of its nodes."""
        runtime = self.store.get(RUNTIMES, job["spec"]["runtimeRef"]["name"]) or {}
        return find_node_job(runtime)["template"]["spec"]

    def _judge_indexes(self, job: Object, pods: list[Object], limit: int) -> None:
        """Start a pod again whose index has not succeeded, but for those that have failed for good."""
        failed, left = [], 0
        for index in range(job["spec"]["trainer"]["numNodes"]):
            own = [pod for pod in pods if pod["metadata"]["labels"][INDEX] == str(index)]
            phases = [pod["status"]["phase"] for pod in own]
            if "Succeeded" in phases:
                continue
            if phases.count("Failed") > limit or any(map(self._fails_index, own)):
                failed.append(index)
                continue
            left += 1
            if phases.count("Failed") == len(own):
                self._create_pod(job, index)
        if failed and not left:
            self._set_condition(job, "Failed", True, "FailedJobs", f"failed indexes: {failed}")
        elif not left:
            self._set_condition(job, "Complete", True, "AllJobsCompleted", "jobset completed successfully")

    def _fails_index(self, pod: Object) -> bool:
        runtime = yaml.safe_load(WORKERS_RUNTIME.read_text())
        rules = find_node_job(runtime)["template"]["spec"]["podFailurePolicy"]["rules"]
        (codes,) = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailIndex"]
        statuses = pod["status"].get("containerStatuses", ())
        return any(each["state"].get("terminated", {}).get("exitCode") in codes for each in statuses)

    def _set_condition(self, job: Object, kind: str, holds: bool, reason: str, message: str) -> None:
        status = job.setdefault("status", {})
        others = [each for each in status.get("conditions", ()) if each["type"] != kind]
        own = {"type": kind, "status": str(holds), "reason": reason, "message": message, "lastTransitionTime": now()}
        status["conditions"] = [*others, own]
        if kind == "Suspended":
            status["begun"] = False
        self.store.write(TRAINJOBS, job)

    def _delete_all(self, pods: Any) -> None:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self.mark_deleted(PODS, pod)

    def _create_pod(self, job: Object, index: int) -> None:
        name = job["metadata"]["name"]
        pod = build_pod(self.store.get(RUNTIMES, job["spec"]["runtimeRef"]["name"]) or {}, job, index)
        self.pod_manifests.append(deepcopy(pod))
        pod["metadata"] |= {"uid": str(uuid4()), "creationTimestamp": now()}
        pod["metadata"]["name"] = f"{name}-node-0-{index}-{uuid4().hex[:5]}"
        pod["status"] = {"phase": "Pending"}
        self.store.write(PODS, pod, "ADDED")

    def _tend_pod(self, pod: Object) -> None:
        """Do what scheduler and kubelet do with a pod."""
        uid, status = pod["metadata"]["uid"], pod["status"]
        container = self._containers.get(uid)
        if "deletionTimestamp" in pod["metadata"] and (container is None or self._is_stopped(pod, container)):
            self._end_container(uid)
            self.store.write(PODS, pod, "DELETED")
        elif container is not None and status["phase"] == "Running" and (code := container.process.poll()) is not None:
            words = container.output.read_text()[-300:] if code else ""
            self._end_container(uid)
            ended = {"exitCode": code % 256, "reason": "Error" if code else "Completed", "message": words}
            status["phase"] = "Failed" if code else "Succeeded"
            status["containerStatuses"] = [{"name": "node", "state": {"terminated": ended}}]
            self.store.write(PODS, pod)
        elif container is None and status["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
            self._start_pod(pod)

    def _start_pod(self, pod: Object) -> None:
        status, image = pod["status"], pod["spec"]["containers"][0]["image"]
        before = deepcopy(status)
        if len(self._containers) >= self.free_nodes:
            message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            status["conditions"] = [condition]
        elif self.images is not None and image not in self.images:
            message = f'Back-off pulling image "{image}": not found'
            waiting = {"reason": "ImagePullBackOff", "message": message}
            status["containerStatuses"] = [{"name": "node", "state": {"waiting": waiting}}]
        else:
            self._containers[pod["metadata"]["uid"]] = self._start_container(pod)
            status["phase"], status["conditions"] = "Running", []
            status["containerStatuses"] = [{"name": "node", "state": {"running": {"startedAt": now()}}}]
        if status != before:
            self.store.write(PODS, pod)

    def _start_container(self, pod: Object) -> _Container:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        job = pod["metadata"]["labels"][JOBSET]
        values = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "TMPDIR": str(folder)}
        values |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(self._find_port(job)), "POD_IP": "127.0.0.1"}
        values["JOB_COMPLETION_INDEX"] = pod["metadata"]["labels"][INDEX]
        for each in container.get("env", ()):
            if "value" in each:
                values[each["name"]] = expand(each["value"], values)
        words = [expand(word, values) for word in (*container["command"], *container.get("args", ()))]
        mark, output = uuid4().hex, self._folder / f"{name}.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [self._replace_mount(word, pod) for word in words],
                env={**values, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
            )
        return _Container(process, ProcessTree(process.pid, mark), output, folder)

    def _replace_mount(self, word: str, pod: Object) -> str:
        """Return a path below a mount as the path in its claim's folder."""
        claims = {
            each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["spec"]["volumes"]
        }
        for mount in pod["spec"]["containers"][0].get("volumeMounts", ()):
            claim = claims[mount["name"]]
            if claim is not None and word.startswith(mount["mountPath"]):
                folder = self.claims[claim] / mount.get("subPath", "")
                return str(folder).rstrip("/") + word.removeprefix(mount["mountPath"])
        return word

    def _is_stopped(self, pod: Object, container: _Container) -> bool:
        if container.process.poll() is not None:
            return True
        grace_s = pod["metadata"]["deletionGracePeriodSeconds"]
        if container.kill_at is None:
            container.process.terminate()
            container.kill_at = time.monotonic() + grace_s
        container.kill_at = min(container.kill_at, time.monotonic() + grace_s)
        if time.monotonic() > container.kill_at:
            container.process.kill()
        return False

    def _end_container(self, uid: str) -> None:
        """End what a container's first process has left, as the end of its namespace does."""
        container = self._containers.pop(uid, None)
        if container is not None:
            container.tree.kill()
            shutil.rmtree(container.folder, ignore_errors=True)

    def _find_port(self, job: str) -> int:
        if job not in self._ports:
            self._ports[job] = reserve_port()
        return self._ports[job]

    @staticmethod
    def _read_time(text: str) -> float:
        from datetime import datetime

        return datetime.fromisoformat(text).timestamp()


JOBSET = "jobset.sigs.k8s.io/jobset-name"
INDEX = "batch.kubernetes.io/job-completion-index"


def find_node_job(runtime: Object) -> Object:
    """Return the replicated job of a runtime's nodes."""
    (found,) = [each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"] if each["name"] == "node"]
    return found


def build_pod(runtime: Object, job: Object, index: int) -> Object:
    """Return the pod of a TrainJob's node: the runtime's template with the trainer's settings and the patches."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    spec = deepcopy(find_node_job(runtime)["template"]["spec"]["template"]["spec"])
    (container,) = spec["containers"]
    container |= {key: deepcopy(trainer[key]) for key in ("image", "command", "args") if key in trainer}
    container["env"] = [*container.get("env", ()), *deepcopy(trainer.get("env", ()))]
    container["resources"] = deepcopy(trainer.get("resourcesPerNode", {}))
    for patch in job["spec"].get("runtimePatches", ()):
        (own,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        more = deepcopy(own["template"]["spec"]["template"]["spec"])
        for each in more.pop("containers", ()):
            assert each.pop("name") == "node"
            container |= each
        spec |= more
    labels = {JOBSET: name, INDEX: str(index)}
    metadata = {"name": f"{name}-node-0-{index}", "namespace": job["metadata"]["namespace"], "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def expand(text: str, values: dict[str, str]) -> str:
    """Return text with $(NAME) replaced as the kubelet does it: unknown names stay, and $$ is one $."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else values.get(found[2], found[0]), text)
