"""Settings of the launcher `slurm`. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from draftworks.config.launcher_base import SchedulerLauncherSpec


class SlurmLauncherSpec(SchedulerLauncherSpec):
    """Jobs are submitted with `sbatch`, from a host that has Slurm's commands and shares `var` with the nodes."""

    kind: Literal["slurm"] = "slurm"
    grace_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds that a job has to save: between terminate and kill, and before its time limit.",
    )
    partition: str | None = Field(default=None, description="Partition, or several with commas; null: the default one.")
    account: str | None = Field(default=None, description="Account that is charged.")
    qos: str | None = Field(default=None, description="Quality of service.")
    gpus: Literal["gpus-per-node", "gres", "none"] = Field(
        default="gpus-per-node",
        description="How the GPUs of a job's ranks are asked for: --gpus-per-node=N, --gres=gpu:N, or not at all.",
    )
    gpu_type: str | None = Field(default=None, description="Type of these GPUs, such as h100.")
    cpus_per_node: int | None = Field(
        default=None, ge=1, description="CPUs on each node; null: `threads` for each rank of it."
    )
    memory: str | None = Field(default=None, description="Memory on each node, such as 64G; 0: all of it.")
    sbatch: list[str] = Field(
        default=[], description="Further options of sbatch, one per entry, such as --constraint=a100 or --exclusive."
    )
    setup: list[str] = Field(
        default=[], description="Lines of shell that run on each node before torchrun, such as `module load cuda`."
    )
    commands: str | None = Field(
        default=None, description="Folder of sbatch, squeue, scontrol and scancel; null: found by PATH."
    )

    @field_validator("sbatch")
    @classmethod
    def _check_options(cls, value: list[str]) -> list[str]:
        for option in value:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"expected options of sbatch such as --constraint=a100, found {option!r}")
            name = option.split("=")[0].split()[0]
            if name in _OURS:
                raise ValueError(f"{name} is set by Draftworks{_OURS[name]}")
        return value

    @field_validator("setup")
    @classmethod
    def _check_lines(cls, value: list[str]) -> list[str]:
        if any("\n" in line for line in value):
            raise ValueError(f"expected one line per entry, found {value!r}")
        return value


_OURS = {
    **dict.fromkeys(("-N", "--nodes"), " (keys nodes and min_nodes)"),
    **dict.fromkeys(("-t", "--time"), " (key time_limit_s)"),
    **dict.fromkeys(("-J", "--job-name", "--comment"), ": jobs are found again by it"),
    **dict.fromkeys(("-o", "--output", "-e", "--error", "--open-mode"), ": the log is beside the run file"),
    **dict.fromkeys(("--requeue", "--no-requeue", "--signal"), ": it submits again what was interrupted"),
    **dict.fromkeys(("-n", "--ntasks", "--ntasks-per-node", "-a", "--array"), ": one torchrun runs on each node"),
    **dict.fromkeys(("-W", "--wait", "--parsable", "--test-only", "--wrap", "-H", "--hold"), ": it submits and waits"),
    "--export": ": the job gets the environment of the run",
}
