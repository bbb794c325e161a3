"""Which failed checks of a target make its run fail. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftworks.config.base import Spec

Outcome = Literal["warn", "error"]


class GateSpec(Spec):
    """Effect of each failed check: `warn` reports it and continues, `error` fails the run and prevents the export.

    The keys `fp8_...` are of the gate before training on features in fp8 (`capture.storage`).

    Only checks that are a matter of judgement are listed. Checks whose failure means a defect (features that are not the
    target's, exports that do not compute the draft's logits) always fail the run.
    """

    loss_falls: Outcome = Field(default="error", description="Training loss ends below where it began.")
    beats_baselines: Outcome = Field(
        default="warn", description="The draft accepts more than a bigram table and than itself untrained."
    )
    not_worse: Outcome = Field(default="warn", description="The draft accepts no less than the one that it replaces.")
    agrees_with_walk: Outcome = Field(default="warn", description="The live server accepts as many tokens as the walk.")
    answers_finished: Outcome = Field(
        default="warn", description="Most answers end before max_new_tokens cuts them off."
    )
    fp8_max_loss: float = Field(
        default=0.02,
        gt=0,
        lt=1,
        description="Features in fp8 are refused unless the upper bound of what drafts lose of their accepted tokens per pass "
        "(rung 3), as a share, is at most this.",
    )
    fp8_samples: int = Field(default=2000, ge=1, description="Training samples of that comparison, chosen by hash.")
    fp8_steps: int = Field(default=500, ge=1, description="Optimizer steps of each of its trainings.")
    fp8_seeds: int = Field(
        default=2, ge=1, description="Its seeds; each trains a draft on plain features and one on fp8."
    )
    fp8_ungated: bool = Field(
        default=False, description="Train on features in fp8 although the comparison has not passed, or was not made."
    )
