"""Settings of the launcher `ray`. Torch-free."""

from __future__ import annotations

from typing import Literal

from draftworks.config.launcher_base import SchedulerLauncherSpec


class RayLauncherSpec(SchedulerLauncherSpec):
    """Jobs are submitted to a Ray cluster."""

    kind: Literal["ray"] = "ray"
