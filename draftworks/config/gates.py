"""Which failed checks of a target make its run fail. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftworks.config.base import Spec

Outcome = Literal["warn", "error"]


class GateSpec(Spec):
    """Effect of each failed check: `warn` reports it and continues, `error` fails the run and prevents the export.

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
