"""Options of streamed training: the feature store is filled while the trainer reads from it. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftworks.config.base import Spec


class WatermarkSpec(Spec):
    """How much producers may have captured that no optimizer step has used yet; null is no limit."""

    samples: int | None = Field(default=256, ge=1, description="Samples; at least one global batch.")
    bytes: int | None = Field(default=None, ge=1, description="Bytes; at least those of the largest step.")
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps.")


class StreamingSpec(Spec):
    """How features stream from producers to a trainer."""

    watermark: WatermarkSpec = Field(default_factory=WatermarkSpec)
    keep: Literal["auto", "until_last_use", "capture_again"] = Field(
        default="auto",
        description="until_last_use keeps features for later epochs, capture_again frees them and pays the target's "
        "forward pass again in each epoch. auto keeps them if all of them fit into capture.budget_gb.",
    )
    free_at: Literal["step", "checkpoint"] = Field(
        default="step",
        description="When features that nothing needs any more are freed. step holds less; after a crash, what the steps "
        "since the last checkpoint used is captured again. checkpoint holds it until then.",
    )
    timeout_s: float = Field(default=1800.0, gt=0, description="How long the trainer waits for one sample's features.")
    lease_s: float = Field(
        default=120.0,
        gt=0,
        description="After this time without a sign of life, a producer's task goes to another one.",
    )

    def resolve_keep(self, nbytes: int, budget_gb: float) -> StreamingSpec:
        """Return the settings with `keep: auto` decided for features of `nbytes` bytes in all."""
        if self.keep != "auto":
            return self
        fits = nbytes <= budget_gb * 1e9
        return self.model_copy(update={"keep": "until_last_use" if fits else "capture_again"})
