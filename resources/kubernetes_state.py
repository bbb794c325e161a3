"""What a TrainJob and its pods say about a job. Pure functions of the objects as the API server returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

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
    """Return what a TrainJob says with its pods.

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
    """Return what the first failed pod says: why the cluster ended it, or its container's reason and exit code."""
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
