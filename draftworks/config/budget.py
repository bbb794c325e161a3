"""The GPU-hours a week that trainings may take which start by themselves. Torch-free."""

from __future__ import annotations

from pydantic import Field, model_validator

from draftworks.config.base import Spec


class BudgetSpec(Spec):
    """How much the trainings take at most that decisions start, and how long one waits that failed."""

    gpu_hours_per_week: float = Field(
        ge=0,
        description="GPU-hours (ranks x wall hours; on CPU too) that such trainings take at most in any 7 days.",
    )
    unknown_gpu_hours: float | None = Field(
        default=None,
        gt=0,
        description="Estimate for a training whose cost is not known from an earlier one; null: it waits for a person.",
    )
    backoff_hours: float = Field(
        default=1.0, gt=0, description="Pause after a training that failed; doubled with each failure in a row."
    )
    longest_backoff_hours: float = Field(default=168.0, gt=0, description="Longest such pause.")

    @model_validator(mode="after")
    def _check_pauses(self) -> BudgetSpec:
        if self.longest_backoff_hours < self.backoff_hours:
            raise ValueError(
                f"longest_backoff_hours {self.longest_backoff_hours:g} is shorter than backoff_hours "
                f"{self.backoff_hours:g}: raise it"
            )
        return self
