"""What the launcher needs of the training runtime that its TrainJobs refer to."""

from __future__ import annotations

from typing import Any

from draftworks.errors import ConfigError
from resources.kubernetes_manifest import NODE

_DEFAULT_GRACE_S = 30
"""Kubernetes' own, of pods that say nothing."""


def require_runtime(runtime: dict[str, Any], grace_s: float, copies: int = 1) -> None:
    """Raise ConfigError if jobs of a runtime would be started again by the cluster, or killed within their grace.

    Restarts are the launcher's: it knows whether an end was an error of the program, which a restart only repeats. Those of
    one of several copies are the cluster's, which has to leave the others alone.
    """
    name = runtime["metadata"]["name"]
    jobset = runtime["spec"]["template"]["spec"]
    nodes = [each for each in jobset.get("replicatedJobs", ()) if each["name"] == NODE]
    if not nodes:
        raise ConfigError(
            f"launcher.runtime: {name} has no replicated job {NODE!r}. deploy/kubernetes/training-runtime.yaml is one"
            " that fits."
        )
    job = nodes[0]["template"]["spec"]
    pod = job["template"]["spec"]
    problems = []
    if not any(container["name"] == NODE for container in pod.get("containers", ())):
        problems.append(f"a container {NODE!r}")
    if copies > 1:
        if not job.get("backoffLimitPerIndex"):
            problems.append("backoffLimitPerIndex, by which one copy is started again alone")
    elif job.get("backoffLimit") != 0:
        problems.append(f"backoffLimit 0 (found {job.get('backoffLimit', 'none, which is 6')})")
    if pod.get("restartPolicy") != "Never":
        problems.append(f"restartPolicy Never (found {pod.get('restartPolicy', 'none, which is OnFailure')})")
    if restarts := jobset.get("failurePolicy", {}).get("maxRestarts"):
        problems.append(f"failurePolicy.maxRestarts 0 (found {restarts})")
    grace = pod.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if grace < grace_s:
        problems.append(f"terminationGracePeriodSeconds of at least launcher.grace_s, {grace_s:g} (found {grace})")
    if problems:
        key, file = ("runtime", "training-runtime") if copies == 1 else ("workers_runtime", "workers-runtime")
        hint = f"deploy/kubernetes/{file}.yaml is one that fits."
        raise ConfigError(f"launcher.{key}: {name} needs {'; '.join(problems)}. {hint}")
