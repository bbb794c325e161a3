"""Settings of the launcher `kubernetes`. Torch-free."""

from __future__ import annotations

from typing import Literal

from draftworks.config.launcher_base import SchedulerLauncherSpec


class KubernetesLauncherSpec(SchedulerLauncherSpec):
    """Jobs are Kubeflow `TrainJob` objects of a Kubernetes cluster."""

    kind: Literal["kubernetes"] = "kubernetes"
