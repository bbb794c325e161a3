"""Settings of the launcher `ray`. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftworks.config.launcher_base import SchedulerLauncherSpec


class RayLauncherSpec(SchedulerLauncherSpec):
    """Jobs are submitted to a Ray cluster: torchrun on one node, or on each of several by Ray Train."""

    kind: Literal["ray"] = "ray"
    address: str = Field(
        default="http://127.0.0.1:8265", min_length=1, description="Of Ray's dashboard, which takes jobs."
    )
    python: str | None = Field(
        default=None, min_length=1, description="Interpreter on the nodes; null: the path of Dagster's own."
    )
    cpus_per_rank: float = Field(default=1.0, ge=0, description="CPUs of Ray that each rank takes.")
    memory_gb: float | None = Field(default=None, gt=0, description="Memory that a job takes on each node, in GB.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom resources of Ray that a job takes on each node, by name."
    )
    start_timeout_s: float = Field(
        default=1800.0, gt=0, description="Seconds in which the nodes of a job of several have to be there."
    )
