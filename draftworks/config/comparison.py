"""Options of comparisons that train drafts to answer a question. Torch-free."""

from __future__ import annotations

from pydantic import Field

from draftworks.config.base import Spec


class ComparisonSpec(Spec):
    """Trainings of `compare_thinking`: on answers with thinking on, off, and on both, for each strategy."""

    tokens: int = Field(
        default=1_000_000, ge=1, description="Tokens of each training set, at most; all have those of the smaller kind."
    )
    steps: int = Field(default=500, ge=1, description="Optimizer steps of each training.")
    seeds: int = Field(default=2, ge=1, description="Seeds; each trains three drafts of a strategy.")
