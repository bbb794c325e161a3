"""Options of turning conversations into supervised tokens. Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftworks.config.base import Spec


class DataSpec(Spec):
    """How conversations become supervised tokens."""

    only_last_turn: bool = Field(default=False, description="Supervise only the last assistant turn.")
    held_out_share: float = Field(
        default=0.1, gt=0, lt=1, description="Share of conversations kept for the eval set `heldout`."
    )
    max_conversations: int | None = Field(
        default=None, gt=0, description="Number of conversations to use, chosen by hash; None = all."
    )
    max_rejected_share: float = Field(
        default=0.05, ge=0, le=1, description="Share of rejected data rows above which the run stops."
    )
    min_supervised_share: float = Field(
        default=0.02, ge=0, le=1, description="Share of supervised tokens below which the run stops."
    )
    workers: int = Field(default=2, ge=1, description="Tokenizer processes.")

    def to_identity(self) -> dict[str, Any]:
        return self.model_dump(exclude={"workers"})
