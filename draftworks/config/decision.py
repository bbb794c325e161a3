"""Options of the decision about the draft in service: margins of the rule, and whether it acts by itself. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftworks.config.base import Spec
from draftworks.config.service import LEAST_PROMPTS


class DecisionSpec(Spec):
    """When the draft in service is kept, tuned or trained anew, and whether that happens by itself."""

    tune_margin: float = Field(
        default=0.05,
        ge=0,
        description="Accepted tokens per pass (walk, rung 3) that the draft in service may lose: where the whole 95% "
        "interval of the loss is at or below this, the draft is kept; where the whole interval is above, it is tuned.",
    )
    retrain_margin: float = Field(
        default=0.15,
        gt=0,
        description="Where the whole interval of the loss is above this, the draft is trained anew.",
    )
    least_prompts: int = Field(
        default=LEAST_PROMPTS, ge=1, description="Prompts that an eval set has to have; with fewer it is undecided."
    )
    act: Literal["none", "tune", "retrain"] = Field(
        default="none",
        description="What is started without being asked for: nothing; tunes; tunes and trainings from the start.",
    )
    traffic: float = Field(
        default=1.0, ge=0, description="Weight of the target where several wait: the largest traffic x loss is first."
    )
    hold: bool = Field(default=False, description="Starts nothing for this target, whatever is decided.")

    @model_validator(mode="after")
    def _check_margins(self) -> DecisionSpec:
        if self.tune_margin >= self.retrain_margin:
            raise ValueError(
                f"tune_margin {self.tune_margin:g} contradicts retrain_margin {self.retrain_margin:g}: it has to be below it, as "
                "only a small loss is tuned away. Lower it, or raise the other"
            )
        return self
