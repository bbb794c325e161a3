"""Settings of the launcher `kubernetes`. Torch-free."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field, field_validator

from draftworks.config.launcher_base import SchedulerLauncherSpec

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_KEY)(_|$)", re.IGNORECASE)
_PLACE = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)
_SECRET_REFERENCE = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+")


class KubernetesLauncherSpec(SchedulerLauncherSpec):
    """Jobs are Kubeflow `TrainJob` objects (trainer.kubeflow.org/v1alpha1, Trainer 2.2 or later) of a cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
    image: str = Field(
        min_length=1, max_length=500, description="Image of every pod, with Draftworks and its libraries installed."
    )
    python: str = Field(default="python", description="Python of the image.")
    namespace: str | None = Field(
        default=None, description="Namespace of the jobs; null: that of the kubeconfig's context, or of this pod."
    )
    kubeconfig: str | None = Field(
        default=None,
        description="Path of a kubeconfig file; null: the service account of the pod that Dagster runs in, outside a pod "
        "KUBECONFIG or ~/.kube/config.",
    )
    context: str | None = Field(default=None, description="Context of the kubeconfig file; null: its current one.")
    runtime: str = Field(
        default="draftworks",
        description="Training runtime that the jobs refer to; deploy/kubernetes/training-runtime.yaml is one.",
    )
    workers_runtime: str = Field(
        default="draftworks-workers",
        description="Training runtime of workers that share the work of one partition (`workers`); "
        "deploy/kubernetes/workers-runtime.yaml is one.",
    )
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        default="ClusterTrainingRuntime", description="Whether the runtimes are the cluster's or the namespace's."
    )
    queue: str | None = Field(default=None, description="Kueue's LocalQueue; null: jobs start without Kueue.")
    priority_class: str | None = Field(default=None, description="Kueue's WorkloadPriorityClass.")
    resources: dict[str, str] = Field(
        default_factory=dict,
        description="Resources of each pod, such as cpu and memory: requested, and its limits. GPUs are added.",
    )
    gpu_resource: str = Field(default="nvidia.com/gpu", description="Name of the resource that is one GPU.")
    volumes: dict[str, str] = Field(
        default_factory=dict,
        description="By the path at which a pod mounts it, a volume claim, or CLAIM/FOLDER for a folder of it. `var`, the "
        "registry and the models must have the same paths as where Dagster runs.",
    )
    shared_memory: str | None = Field(
        default="8Gi", description="Size of /dev/shm; null: the node's default (64 MiB as a rule)."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment of all pods, readable in the TrainJob.")
    secrets: dict[str, str] = Field(
        default_factory=dict, description="By environment variable, the key of a Secret that holds its value: NAME/KEY."
    )
    service_account: str | None = Field(default=None, description="Service account of the pods.")
    image_pull_secrets: list[str] = Field(default_factory=list, description="Secrets with the registry's credentials.")
    pod: dict[str, Any] = Field(
        default_factory=dict,
        description="More of the pod's specification that a TrainJob may set: nodeSelector, affinity, tolerations, "
        "securityContext, schedulingGates, volumes.",
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the TrainJob.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of the TrainJob.")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Merged over the finished TrainJob key by key; lists are replaced."
    )
    start_patience_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for which a pod may fail to start, such as for an image that cannot be pulled, before the "
        "job is given up.",
    )
    keep_ended_hours: float = Field(
        default=24.0,
        gt=0,
        description="Hours after which a TrainJob that has ended is deleted, by the orphans' sensor.",
    )

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if is_secret_name(name):
                raise ValueError(
                    f"{name} would be readable in the TrainJob: give it in `secrets` as NAME/KEY of a Secret"
                )
        return env

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: dict[str, str]) -> dict[str, str]:
        for name, reference in secrets.items():
            if not _SECRET_REFERENCE.fullmatch(reference):
                raise ValueError(
                    f"{name}: expected NAME/KEY of a Secret of the namespace (found {len(reference)} characters)"
                )
        return secrets

    @field_validator("volumes")
    @classmethod
    def _check_volumes(cls, volumes: dict[str, str]) -> dict[str, str]:
        for path, source in volumes.items():
            if not PurePosixPath(path).is_absolute() or not source.strip("/"):
                raise ValueError(f"expected ABSOLUTE_PATH: CLAIM or CLAIM/FOLDER (found {path!r}: {source!r})")
        return volumes


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable's name says that its value is a secret, and not the place of one."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)
