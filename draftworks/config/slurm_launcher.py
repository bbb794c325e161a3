"""Settings of the launcher `slurm`. Torch-free."""

from __future__ import annotations

from typing import Literal

from draftworks.config.launcher_base import SchedulerLauncherSpec


class SlurmLauncherSpec(SchedulerLauncherSpec):
    """Jobs are submitted with `sbatch`."""

    kind: Literal["slurm"] = "slurm"
