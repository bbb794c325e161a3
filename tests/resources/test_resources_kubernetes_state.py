"""What a TrainJob and its pods say, as sequences of statuses written after Kubernetes', Trainer's and Kueue's documents.
What is wrong with a cluster or the way to it is one error, with the server's words, before a job exists.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_kubernetes import RUNTIMES, write_kubeconfig
from kubernetes_toys import KubernetesBench, kubernetes_bench

from draftworks.config.launchers import KubernetesLauncherSpec
from draftworks.errors import ConfigError, DraftworksError, LauncherError
from resources.kubernetes_scheduler import make_scheduler
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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[KubernetesBench]:
    with kubernetes_bench(tmp_path) as bench:
        yield bench


def forbid(bench: KubernetesBench) -> None:
    bench.cluster.forbidden.add(("POST", "trainjobs"))


def remove_namespace(bench: KubernetesBench) -> None:
    bench.cluster.namespaces.clear()


def remove_trainer(bench: KubernetesBench) -> None:
    bench.cluster.without_trainer = True


def remove_runtime(bench: KubernetesBench) -> None:
    bench.cluster.store.objects.pop((RUNTIMES, "draftworks"))


def misspell(bench: KubernetesBench) -> None:
    bench.settings["overrides"] = {"spec": {"trainer": {"numNode": 2}}}


def send_another_token(bench: KubernetesBench) -> None:
    write_kubeconfig(Path(bench.settings["kubeconfig"]), bench.address, token="old")


def weaken_runtime(bench: KubernetesBench) -> None:
    bench.settings["grace_s"] = 600


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (
            forbid,
            ConfigError,
            'User "system:serviceaccount:drafts:dagster" cannot post resource "trainjobs".*access.yaml',
        ),
        (remove_namespace, ConfigError, 'namespace drafts: cannot create TrainJob .*namespaces "drafts" not found'),
        (
            remove_trainer,
            ConfigError,
            "has no ClusterTrainingRuntime draftworks. Is Kubeflow Trainer 2.2 or later installed there?",
        ),
        (
            remove_runtime,
            ConfigError,
            "has no ClusterTrainingRuntime draftworks. deploy/kubernetes/training-runtime.yaml",
        ),
        (misspell, ConfigError, 'unknown field "spec.trainer.numNode"'),
        (send_another_token, LauncherError, "Unauthorized .*Renew the credentials"),
        (weaken_runtime, ConfigError, "terminationGracePeriodSeconds of at least launcher.grace_s, 600"),
    ],
    ids=["forbidden", "no-namespace", "no-trainer", "no-runtime", "misspelt", "old-token", "short-grace"],
)
def test_a_refused_job_is_one_error_with_the_servers_words(
    bench: KubernetesBench, spoil: Callable[[KubernetesBench], None], kind: type[DraftworksError], words: str
) -> None:
    spoil(bench)
    with pytest.raises(kind) as caught:
        bench.make_scheduler().create(bench.request())
    assert re.search(words, str(caught.value))
    assert "\n" not in str(caught.value)
    assert not bench.cluster.store.list("trainjobs")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_trainer, "Is Kubeflow Trainer 2.2 or later installed there?"),
        (remove_runtime, "has no ClusterTrainingRuntime draftworks"),
        (send_another_token, "Unauthorized .*Renew the credentials"),
        (lambda bench: bench.settings.update(volumes={"/data": "shared"}), "none holds the folder of the run"),
    ],
    ids=["no-trainer", "no-runtime", "old-token", "no-volume"],
)
def test_a_check_finds_what_is_known_before_a_job_exists(
    bench: KubernetesBench, spoil: Callable[[KubernetesBench], None], words: str
) -> None:
    bench.make_scheduler().check(bench.request())
    spoil(bench)
    with pytest.raises(DraftworksError, match=words):
        bench.make_scheduler().check(bench.request())
    assert not [verb for verb, _, _ in bench.cluster.calls if verb != "GET"]


def test_a_runtime_that_may_not_be_read_is_not_checked(bench: KubernetesBench) -> None:
    bench.cluster.forbidden.add(("GET", RUNTIMES))
    scheduler = bench.make_scheduler()
    scheduler.end(scheduler.create(bench.request()), 0.0)


def test_a_server_that_is_not_there_is_told_with_its_address(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        path = write_kubeconfig(tmp_path / "kubeconfig", address)
        scheduler = make_scheduler(KubernetesLauncherSpec(image="i", kubeconfig=str(path)))
        with pytest.raises(
            LauncherError, match=f"{address}, namespace drafts: .* API server cannot be reached: .*refused"
        ):
            scheduler.find("dw-1")


@pytest.mark.parametrize(
    ("content", "context", "words"),
    [
        (None, None, "No configuration found|Invalid kube-config"),
        ("[", None, "expected the node content"),
        ("- 1", None, ""),
        ("ok", "other", "other"),
    ],
    ids=["missing", "not-yaml", "a-list", "no-such-context"],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | None, context: str | None, words: str
) -> None:
    path = tmp_path / "kubeconfig"
    if content == "ok":
        write_kubeconfig(path, "http://127.0.0.1:9")
    elif content is not None:
        path.write_text(content)
    spec = KubernetesLauncherSpec(image="i", kubeconfig=str(path), context=context)
    with pytest.raises(ConfigError, match=f"launcher.kubeconfig: {path} cannot be used: .*") as caught:
        make_scheduler(spec)
    assert re.search(words, str(caught.value))


def test_the_namespace_is_the_contexts_unless_it_is_given(bench: KubernetesBench) -> None:
    bench.cluster.namespaces |= {"other", "default"}
    found = [bench.make_scheduler().create(bench.request(name="dw-1"))]
    found += [bench.make_scheduler(namespace="other").create(bench.request(name="dw-2"))]
    write_kubeconfig(Path(bench.settings["kubeconfig"]), bench.address, namespace=None)
    found += [bench.make_scheduler().create(bench.request(name="dw-3"))]
    assert [id.split("/")[0] for id in found] == ["drafts", "other", "default"]


def test_without_the_client_one_error_names_the_extra_and_the_module_loads() -> None:
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from draftworks.config.launchers import KubernetesLauncherSpec\n"
        "from resources.kubernetes_scheduler import make_scheduler\n"
        "make_scheduler(KubernetesLauncherSpec(image='i'))"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert ended.returncode == 1
    assert "ConfigError: launcher.kind: kubernetes needs the official client" in ended.stderr
    assert "pip install -e '.[kubernetes]'" in ended.stderr
