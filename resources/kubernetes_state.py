"""The state of a job from its TrainJob and pods, watched as they change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from draftworks.errors import LauncherError
from resources.kubernetes_client import ApiError, Change, KubernetesApi, Listing
from resources.kubernetes_manifest import CLAIM, COPIES, MIN_NODES, NODE, QUEUE
from resources.scheduler import DeadCopy, SeenJob
from resources.torch_job import JobState

Object = Mapping[str, Any]
"""An object of the API, as JSON."""

_CANNOT_START = {
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
}
"""Reasons of a waiting container that only a change of the image, the configuration or a Secret ends."""
_ENDED_BY_CLUSTER = {
    "Evicted",
    "Preempting",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "UnexpectedAdmissionError",
}
"""Reasons of a failed pod that its program had no part in."""
_DEADLINE = "DeadlineExceeded"
_INDEX = "batch.kubernetes.io/job-completion-index"
"""Label of a pod: which node of its job it is, or which copy."""


class _Verdict(NamedTuple):
    state: JobState
    reason: str = ""
    lost: bool = False


def make_id(train_job: Object) -> str:
    """Return NAMESPACE/NAME/UID: a later TrainJob of the same name is another job."""
    metadata = train_job["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}/{metadata['uid']}"


def read_state(train_job: Object, pods: Iterable[Object], loss: str = "") -> SeenJob:
    """Return the state of a TrainJob with its pods.

    Args:
        loss: how the cluster ended a pod of this job before any other pod failed, from `describe_loss`; empty if unknown.
    """
    pods = list(pods)
    verdict = _judge(train_job, pods, loss)
    metadata = train_job["metadata"]
    claim = metadata.get("annotations", {}).get(CLAIM)
    return SeenJob(
        id=make_id(train_job),
        name=metadata["name"],
        state=verdict.state,
        reason=verdict.reason,
        lost=verdict.lost,
        claim=None if claim is None else Path(claim),
        dead=_list_dead(train_job, pods),
    )


def has_ended(train_job: Object) -> bool:
    return _find_condition(train_job, "Complete") is not None or _find_condition(train_job, "Failed") is not None


def find_age_s(train_job: Object, now: datetime | None = None) -> float:
    """Return the seconds since a TrainJob ended; below 0 if it has not."""
    ended = _find_condition(train_job, "Complete") or _find_condition(train_job, "Failed")
    if ended is None:
        return -1.0
    return ((now or datetime.now(UTC)) - datetime.fromisoformat(ended["lastTransitionTime"])).total_seconds()


def is_suspended(train_job: Object) -> bool:
    """Return whether a TrainJob is or is being suspended, as Kueue does before admission and on pre-emption."""
    return bool(train_job["spec"].get("suspend"))


def has_failed(pod: Object) -> bool:
    """Return whether a pod failed by itself: it is not being deleted, and the cluster did not end it."""
    return pod.get("status", {}).get("phase") == "Failed" and not describe_loss(pod)


def describe_loss(pod: Object) -> str:
    """Return how the cluster or a person ended a pod; empty for one that runs, or that ended by itself."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"pod {name}: {_join(condition.get('reason'), condition.get('message'))}"
    if status.get("phase") == "Failed" and status.get("reason") in _ENDED_BY_CLUSTER:
        return f"pod {name}: {_join(status.get('reason'), status.get('message'))}"
    if pod["metadata"].get("deletionTimestamp") and status.get("phase") not in ("Succeeded", "Failed"):
        return f"pod {name} was deleted"
    return ""


def describe_obstacle(pod: Object, patience_s: float, now: datetime | None = None) -> str:
    """Return why a pod cannot start, after `patience_s` seconds in which that did not change; empty if it may start."""
    reason = _describe_waiting(pod, _CANNOT_START)
    if not reason:
        return ""
    return reason if _find_age_of_pod_s(pod, now) >= patience_s else ""


def count_room(train_job: Object, pods: Iterable[Object], patience_s: float, now: datetime | None = None) -> int | None:
    """Return on how many nodes a job could run now whose other pods found no node for `patience_s` seconds.

    None for a job that has all its nodes, may not run on fewer, or has too few.
    """
    fewest = train_job["metadata"].get("annotations", {}).get(MIN_NODES)
    pods = list(pods)
    waiting = [pod for pod in pods if _describe_unschedulable(pod)]
    patient = all(_find_age_of_pod_s(pod, now) >= patience_s for pod in waiting)
    if fewest is None or not waiting or not patient or is_suspended(train_job):
        return None
    room = len(pods) - len(waiting)
    return room if int(fewest) <= room < count_nodes(train_job) else None


def count_nodes(train_job: Object) -> int:
    """Return the number of nodes that a TrainJob asks for."""
    return train_job["spec"].get("trainer", {}).get("numNodes", 1)


def _judge(train_job: Object, pods: list[Object], loss: str) -> _Verdict:
    if (failed := _find_condition(train_job, "Failed")) is not None:
        late = failed.get("reason") == _DEADLINE
        gone = not late and not any(has_failed(pod) for pod in pods)
        words = loss or _describe_failure(pods) or ("its pods are gone" if gone else "")
        reason = "; ".join(filter(None, (_join(failed.get("reason"), failed.get("message")), words)))
        return _Verdict(JobState.FAILED, reason, lost=late or gone or bool(loss))
    if _find_condition(train_job, "Complete") is not None:
        return _Verdict(JobState.SUCCEEDED)
    if train_job["metadata"].get("deletionTimestamp"):
        return _Verdict(JobState.RUNNING, "it is being deleted")
    running = [pod for pod in pods if pod.get("status", {}).get("phase") in ("Running", "Succeeded")]
    fewest = 1 if _has_copies(train_job) else count_nodes(train_job)
    if not is_suspended(train_job) and len(running) >= fewest:
        return _Verdict(JobState.RUNNING)
    return _Verdict(JobState.PENDING, _describe_queue(train_job, pods))


def _has_copies(train_job: Object) -> bool:
    return COPIES in train_job["metadata"].get("annotations", {})


def _list_dead(train_job: Object, pods: Iterable[Object]) -> tuple[DeadCopy, ...]:
    """Return the copies of which a pod has failed; the cluster may have started another one since."""
    if not _has_copies(train_job) or is_suspended(train_job):
        return ()
    failed = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"]
    return tuple(
        DeadCopy(int(pod["metadata"]["labels"][_INDEX]), pod["metadata"]["uid"], bool(describe_loss(pod)))
        for pod in failed
    )


def _describe_queue(train_job: Object, pods: list[Object]) -> str:
    """Return why a job does not run yet, or not now."""
    if is_suspended(train_job):
        queue = train_job["metadata"].get("labels", {}).get(QUEUE)
        return "suspended" if queue is None else f"suspended by Kueue; it waits in the queue {queue}"
    for pod in pods:
        if words := describe_loss(pod) or _describe_waiting(pod, _CANNOT_START) or _describe_unschedulable(pod):
            return words
    return f"{len(pods)} of {count_nodes(train_job)} pods are there, and not all have started"


def _describe_failure(pods: list[Object]) -> str:
    """Return the failure of the first failed pod: why the cluster ended it, or its container's reason and exit code."""
    for pod in pods:
        if loss := describe_loss(pod):
            return loss
    for pod in pods:
        for container in _list_containers(pod):
            ended = container.get("state", {}).get("terminated")
            if ended and ended.get("exitCode"):
                code = f"exit code {ended['exitCode']}"
                words = _join(ended.get("reason"), (ended.get("message") or "").strip())
                return f"pod {pod['metadata']['name']}: {words} ({code})"
    return ""


def _describe_waiting(pod: Object, reasons: set[str]) -> str:
    for container in _list_containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in reasons:
            return f"pod {pod['metadata']['name']}: {_join(waiting.get('reason'), waiting.get('message'))}"
    return ""


def _describe_unschedulable(pod: Object) -> str:
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"pod {pod['metadata']['name']}: {_join(condition.get('reason'), condition.get('message'))}"
    return ""


def _find_age_of_pod_s(pod: Object, now: datetime | None) -> float:
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return ((now or datetime.now(UTC)) - created).total_seconds()


def _list_containers(pod: Object) -> list[Object]:
    """Return the statuses of a pod's containers, that of the job's own first."""
    status = pod.get("status", {})
    containers = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
    return sorted(containers, key=lambda container: container.get("name") != NODE)


def _find_condition(train_job: Object, kind: str) -> Object | None:
    """Return a condition that holds."""
    conditions = train_job.get("status", {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind and each["status"] == "True"), None)


def _join(reason: str | None, message: str | None) -> str:
    return ": ".join(filter(None, (reason, message)))


_GONE = 410
_RETRY_S = (0.5, 15.0)
"""Seconds before a failed call is made again: at first, and at most."""


class JobWatch:
    """One TrainJob and its pods, followed by two threads.

    Pods are watched because they say what the TrainJob does not: which of them ended first, and whether it failed or the
    cluster, or a person, ended it.
    """

    def __init__(self, api: KubernetesApi, train_job: dict[str, Any]) -> None:
        """Start to follow a TrainJob that was read a moment ago."""
        self._api = api
        self._name = train_job["metadata"]["name"]
        self._uid = train_job["metadata"]["uid"]
        self._lock = threading.Lock()
        self._job = train_job
        self._is_gone = False
        self._pods: dict[str, dict[str, Any]] = {}
        self._loss = ""
        self._silent_since: dict[str, float] = {}
        self._error: LauncherError | None = None
        self._over = threading.Event()
        self._replace_pods(api.list_pods(self._name).items)
        for what, follow in (("job", self._follow_job), ("pods", self._follow_pods)):
            threading.Thread(target=follow, name=f"watch-{what}-{self._name}", daemon=True).start()

    def read(self) -> SeenJob:
        """Return the job as it was last seen. One whose TrainJob was deleted is cancelled once its pods are gone."""
        with self._lock:
            seen = read_state(self._job, list(self._pods.values()), self._loss)
            if not self._is_gone or seen.state.is_final:
                return seen
            state = JobState.RUNNING if self._pods else JobState.CANCELLED
            return replace(seen, state=state, reason=f"TrainJob {self._name} was deleted")

    @property
    def train_job(self) -> dict[str, Any]:
        """The TrainJob as it was last seen."""
        with self._lock:
            return self._job

    @property
    def pods(self) -> list[dict[str, Any]]:
        """The pods as they were last seen."""
        with self._lock:
            return list(self._pods.values())

    @property
    def silence_s(self) -> float:
        """Seconds for which the API server has not answered; 0 while it does."""
        with self._lock:
            return time.monotonic() - min(self._silent_since.values()) if self._silent_since else 0.0

    @property
    def error(self) -> LauncherError | None:
        """The last call's error."""
        return self._error

    def close(self) -> None:
        """Let the threads end with their current calls."""
        self._over.set()

    def _follow_job(self) -> None:
        def replace(items: list[dict[str, Any]]) -> None:
            self._set_job(next((item for item in items if item["metadata"]["uid"] == self._uid), None))

        def change(event: Change) -> None:
            if event.item["metadata"]["uid"] == self._uid:
                self._set_job(None if event.kind == "DELETED" else event.item)

        api = self._api
        self._follow("job", lambda: api.list_jobs(self._name), lambda v: api.watch_jobs(self._name, v), replace, change)

    def _follow_pods(self) -> None:
        api = self._api
        self._follow(
            "pods",
            lambda: api.list_pods(self._name),
            lambda version: api.watch_pods(self._name, version),
            self._replace_pods,
            self._change_pod,
        )

    def _follow(
        self,
        what: str,
        list_: Callable[[], Listing],
        watch: Callable[[str], Iterator[Change]],
        replace: Callable[[list[dict[str, Any]]], None],
        change: Callable[[Change], None],
    ) -> None:
        """List, then watch from that version, for as long as the server knows it; after an error begin again."""
        wait_s, version = _RETRY_S[0], ""
        while not self._over.is_set():
            try:
                if not version:
                    listing = list_()
                    replace(listing.items)
                    version = listing.version
                self._note_answer(what)
                wait_s, begun = _RETRY_S[0], time.monotonic()
                for event in watch(version):
                    version = event.item["metadata"]["resourceVersion"]
                    change(event)
                    self._note_answer(what)
                    if self._over.is_set():
                        return
                if time.monotonic() - begun < wait_s:  # something between ends watches at once
                    self._over.wait(wait_s)
            except Exception as error:  # whatever it is: a job that nobody follows would seem to run for ever
                version = ""
                if isinstance(error, ApiError) and error.status == _GONE:
                    continue
                words = f"cannot follow TrainJob {self._name}: {type(error).__name__}: {error}"
                self._note_error(what, error if isinstance(error, LauncherError) else LauncherError(words))
                self._over.wait(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])

    def _note_answer(self, what: str) -> None:
        with self._lock:
            self._silent_since.pop(what, None)

    def _note_error(self, what: str, error: LauncherError) -> None:
        with self._lock:
            self._error = error
            self._silent_since.setdefault(what, time.monotonic())

    def _set_job(self, train_job: dict[str, Any] | None) -> None:
        with self._lock:
            self._is_gone = train_job is None
            self._job = train_job or self._job
            if is_suspended(self._job):
                self._loss = ""  # its pods are deleted because it is suspended, and come back

    def _replace_pods(self, items: list[dict[str, Any]]) -> None:
        now = {item["metadata"]["uid"]: item for item in items}
        with self._lock:
            gone = [pod for uid, pod in self._pods.items() if uid not in now]
        for pod in gone:
            self._change_pod(Change("DELETED", pod))
        for pod in items:
            self._change_pod(Change("MODIFIED", pod))

    def _change_pod(self, event: Change) -> None:
        uid = event.item["metadata"]["uid"]
        with self._lock:
            if not self._loss and self._is_up() and not any(map(has_failed, self._pods.values())):
                unfinished = event.item.get("status", {}).get("phase") not in ("Succeeded", "Failed")
                deleted = event.kind == "DELETED" and unfinished
                self._loss = describe_loss(event.item) or (
                    f"pod {event.item['metadata']['name']} was deleted" if deleted else ""
                )
            if event.kind == "DELETED":
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = event.item

    def _is_up(self) -> bool:
        """Whether a pod that ends now is no consequence of what happened to the TrainJob before."""
        job = self._job
        going = self._is_gone or job["metadata"].get("deletionTimestamp")
        return not (going or is_suspended(job) or has_ended(job))
