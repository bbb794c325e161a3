"""What is kept, and for how long. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from draftworks.config.base import Spec
from draftworks.config.cron import parse_cron

Kind = Literal["drafts", "reports", "exports", "data", "features", "eval_features", "answers", "runs", "unfinished"]


class RetentionSpec(Spec):
    """What `draftworks prune` may remove: nothing that a result in use was made from, and nothing young."""

    keep_days: float = Field(
        default=7.0, ge=0, description="Days for which everything is kept after it was last written to."
    )
    runs_days: float = Field(default=30.0, ge=0, description="Days for which logs and run files of a run are kept.")
    budget_gb: dict[Kind, float] = Field(
        default_factory=dict,
        description="GB by kind; what nothing refers to goes, the cheapest to make again first, until the kind has no "
        "more. A kind without a budget keeps nothing that nothing refers to.",
    )
    cron: str | None = Field(default=None, description="When to prune by a schedule; default: only by command.")

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, value: str | None) -> str | None:
        return None if value is None else parse_cron(value)

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes by kind."""
        return {kind: round(size * 1e9) for kind, size in self.budget_gb.items()}
