"""Settings that every launcher has, of whatever kind. Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from draftworks.config.base import Spec

DEFAULT_POOL = "gpu"


class LauncherSpec(Spec):
    """Base of the settings of all kinds of launchers; each kind adds its own keys, and a literal `kind`."""

    kind: Any  # each kind narrows it to a literal string
    grace_s: float = Field(default=10.0, ge=0, description="Seconds between terminate and kill.")
    threads: int = Field(default=1, ge=1, description="OMP threads of each rank on CPU.")
    stall_limit_s: float | None = Field(
        default=1800.0,
        gt=0,
        description="Seconds without progress of any kind after which a job is ended; null: never.",
    )
    time_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that one job may run; null: as long as it takes. A scheduler's job that saves checkpoints is "
        "submitted again after that time, until it is done.",
    )
    pool: str | None = Field(
        default=DEFAULT_POOL,
        pattern=r"^\S+$",
        examples=["gpu"],
        description="Dagster's pool in which steps wait for a place before they start such a job; null: they do not wait, "
        "as the scheduler has a queue of its own.",
    )
    nodes: int = Field(default=1, ge=1, description="Machines of one job; each runs as many ranks as a job on one has.")
    min_nodes: int | None = Field(
        default=None, ge=1, description="Fewest machines that a job goes on with after one was lost; null: `nodes`."
    )
    workers: int = Field(
        default=1,
        ge=1,
        description="Jobs that share the work of one partition, each of as many ranks as one would have; for the programs "
        "capture and regenerate. Whatever the number, the result is the same.",
    )
    programs: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="By program (train, capture, evaluate ...): keys of this section that differ for its jobs.",
    )

    @model_validator(mode="after")
    def _check_nodes(self) -> LauncherSpec:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        return self

    @property
    def least_nodes(self) -> int:
        """Fewest machines that a job goes on with."""
        return self.nodes if self.min_nodes is None else self.min_nodes


class SchedulerLauncherSpec(LauncherSpec):
    """Base of the settings of launchers whose jobs live in a scheduler and survive the process that submitted them."""

    poll_interval_s: float = Field(
        default=2.0, gt=0, description="Seconds between two questions to the scheduler about a job."
    )
    orphan_minutes: float = Field(
        default=10.0, gt=0, description="Minutes after which a job is ended that no living run has claimed."
    )
