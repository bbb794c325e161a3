"""Options of the serving check: how many prompts are sent to a live server, and how it is started. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from draftworks.config.base import Dtype, Spec
from draftworks.config.sglang import StartedServer


class ServingSpec(Spec):
    """Rung 6 of the acceptance ladder: the exported draft in a live SGLang server that is started for the measurement."""

    prompts: int = Field(default=0, ge=0, description="Held-out samples to answer; 0 leaves the rung out.")
    concurrency: int = Field(default=8, ge=1, description="Requests at a time.")
    compute_dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of target and draft in the server. Left out, it is float32 on a CPU, where SGLang takes nothing else.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if there is one.")
    format: str | None = Field(default=None, description="Export format to serve; default the first that SGLang loads.")
    tolerance: float = Field(
        default=0.05,
        ge=0,
        description="Difference from the walk (rung 3) that is no warning, as a share of its tokens per pass.",
    )
    server: StartedServer = Field(default_factory=StartedServer)

    def to_identity(self) -> dict[str, Any]:
        """Return the options that determine the figures."""
        return self.model_dump(exclude={"device"})
