"""What a TrainJob and its pods say, as sequences of statuses written after Kubernetes', Trainer's and Kueue's documents."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from resources.kubernetes_state import describe_loss, describe_obstacle, find_age_s, read_state
from resources.torch_job import JobState

CREATED = "2026-11-23T10:00:00Z"
PENDING, RUNNING, SUCCEEDED, FAILED = JobState.PENDING, JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED


def train_job(
    *conditions: tuple[str, str, str], nodes: int = 1, suspend: bool = False, **metadata: Any
) -> dict[str, Any]:
    """A TrainJob whose conditions (type, reason, message) hold."""
    listed = [
        {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": CREATED}
        for kind, reason, message in conditions
    ]
    return {
        "metadata": {"name": "dw-1", "namespace": "drafts", "uid": "u", **metadata},
        "spec": {"suspend": suspend, "trainer": {"numNodes": nodes}},
        "status": {"conditions": listed},
    }


def pod(phase: str, number: int = 0, deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": f"dw-1-node-0-{number}", "uid": f"p{number}", "creationTimestamp": CREATED}
    metadata |= {"deletionTimestamp": CREATED} if deleted else {}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": state}]}


def waiting(reason: str) -> dict[str, Any]:
    return container(waiting={"reason": reason, "message": "as the kubelet says"})


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return container(terminated={"exitCode": code, "reason": reason, "message": "the last line\n"})


def holds(kind: str, reason: str, status: str = "True") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": "as it says"}]}


BROKEN = ("Failed", "FailedJobs", "jobset failed due to one or more job failures")
DONE = ("Complete", "AllJobsCompleted", "jobset completed successfully")
SUSPENDED = ("Suspended", "Suspended", "TrainJob is suspended")
SEQUENCES: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]], JobState, str, bool]]] = {
    "one-node": [
        (train_job(), [], PENDING, "0 of 1 pods", False),
        (train_job(), [pod("Pending")], PENDING, "1 of 1 pods are there, and not all have started", False),
        (train_job(), [pod("Pending", **waiting("ContainerCreating"))], PENDING, "not all have started", False),
        (train_job(), [pod("Running")], RUNNING, "", False),
        (train_job(DONE), [pod("Succeeded")], SUCCEEDED, "", False),
    ],
    "two-nodes": [
        (train_job(nodes=2), [pod("Running"), pod("Pending", 1)], PENDING, "2 of 2 pods", False),
        (train_job(nodes=2), [pod("Running"), pod("Running", 1)], RUNNING, "", False),
        (train_job(nodes=2), [pod("Succeeded"), pod("Running", 1)], RUNNING, "", False),
        (train_job(DONE, nodes=2), [pod("Succeeded"), pod("Succeeded", 1)], SUCCEEDED, "", False),
    ],
    "kueue": [
        (
            train_job(SUSPENDED, suspend=True, labels={"kueue.x-k8s.io/queue-name": "q"}),
            [],
            PENDING,
            "in the queue q",
            False,
        ),
        (train_job(), [pod("Running")], RUNNING, "", False),
        (train_job(suspend=True), [pod("Running", deleted=True)], PENDING, "suspended", False),
        (train_job(SUSPENDED, suspend=True), [], PENDING, "suspended", False),
        (train_job(), [pod("Running")], RUNNING, "", False),
    ],
    "unschedulable": [
        (
            train_job(),
            [pod("Pending", **holds("PodScheduled", "Unschedulable", "False"))],
            PENDING,
            "Unschedulable: as",
            False,
        ),
    ],
    "image": [
        (train_job(), [pod("Pending", **waiting("ErrImagePull"))], PENDING, "ErrImagePull: as the kubelet says", False),
        (train_job(), [pod("Pending", **waiting("ImagePullBackOff"))], PENDING, "ImagePullBackOff", False),
    ],
    "program-failed": [
        (train_job(), [pod("Failed", **ended(1))], PENDING, "1 of 1", False),
        (train_job(BROKEN), [pod("Failed", **ended(1))], FAILED, "Error: the last line (exit code 1)", False),
    ],
    "out-of-memory": [(train_job(BROKEN), [pod("Failed", **ended(137, "OOMKilled"))], FAILED, "OOMKilled", False)],
    "evicted": [
        (
            train_job(BROKEN),
            [pod("Failed", reason="Evicted", message="low on memory")],
            FAILED,
            "Evicted: low on",
            True,
        ),
    ],
    "pre-empted-by-the-scheduler": [
        (
            train_job(),
            [pod("Running", deleted=True, **holds("DisruptionTarget", "PreemptionByScheduler"))],
            RUNNING,
            "",
            False,
        ),
        (
            train_job(BROKEN),
            [pod("Failed", deleted=True, **holds("DisruptionTarget", "PreemptionByScheduler"), **ended(1))],
            FAILED,
            "PreemptionByScheduler",
            True,
        ),
    ],
    "pods-gone": [(train_job(BROKEN), [], FAILED, "its pods are gone", True)],
    "deadline": [
        (train_job(("Failed", "DeadlineExceeded", "too long")), [], FAILED, "DeadlineExceeded: too long", True)
    ],
    "being-deleted": [(train_job(deletionTimestamp=CREATED), [pod("Running")], RUNNING, "it is being deleted", False)],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_statuses_are_read_as_they_follow_each_other(name: str) -> None:
    for number, (job, pods, state, reason, lost) in enumerate(SEQUENCES[name]):
        seen = read_state(job, pods)
        assert (number, seen.state, seen.lost) == (number, state, lost), seen.reason
        assert reason in seen.reason
        assert reason or not seen.reason


def test_what_ended_a_pod_before_the_others_failed_outweighs_their_failure() -> None:
    failed = train_job(BROKEN, nodes=2)
    assert not read_state(failed, [pod("Failed", **ended(1))]).lost
    assert read_state(failed, [pod("Failed", **ended(1))], loss="pod dw-1-node-0-1 was deleted").lost


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (pod("Failed", **ended(1)), ""),
        (pod("Succeeded", deleted=True), ""),
        (pod("Running", deleted=True), "pod dw-1-node-0-0 was deleted"),
        (pod("Failed", reason="NodeShutdown", message="m"), "pod dw-1-node-0-0: NodeShutdown: m"),
        (pod("Running", **holds("DisruptionTarget", "EvictionByEvictionAPI")), "EvictionByEvictionAPI: as it says"),
    ],
    ids=["own-error", "done", "deleted", "shutdown", "drained"],
)
def test_an_end_by_the_cluster_is_no_end_by_the_program(status: dict[str, Any], words: str) -> None:
    assert words in describe_loss(status)
    assert bool(words) == bool(describe_loss(status))


def test_patience_is_counted_from_the_pods_creation() -> None:
    stuck = pod("Pending", **waiting("CreateContainerConfigError"))
    start = datetime.fromisoformat(CREATED).astimezone(UTC)
    assert not describe_obstacle(stuck, 60.0, start + timedelta(seconds=59))
    assert "CreateContainerConfigError" in describe_obstacle(stuck, 60.0, start + timedelta(seconds=60))
    assert not describe_obstacle(pod("Pending", **waiting("ContainerCreating")), 0.0, start + timedelta(days=1))
    assert find_age_s(train_job(DONE), start + timedelta(hours=1)) == 3600
    assert find_age_s(train_job()) < 0
