"""What one draft for thinking on and off costs: drafts trained on one kind and on both, measured on each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftworks.config.data import OFF, ON
from draftworks.data.tokenized import MIXED
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.relative_loss import SeedPair, judge_relative_loss
from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceSummary,
    Resampling,
    summarize_acceptance,
)
from draftworks.evaluation.report.thinking import sum_prompt

TRAININGS = (ON, OFF, MIXED)
WAYS = (ON, OFF)
WalkByWay = Mapping[str, Sequence[PromptAcceptance]]


@dataclass(frozen=True)
class ThinkingCost:
    """Drafts of one training on prompts of one kind.

    Attributes:
        acceptance: of the drafts of all seeds together.
        loss: accepted tokens per pass that are lost against the drafts trained on this kind alone, as a share, with its
            bounds; negative where it is a gain. None for those drafts, and where they accept nothing.
        by_seed: the loss with each seed.
    """

    training: str
    way: str
    acceptance: AcceptanceSummary
    loss: float | None = None
    low: float | None = None
    high: float | None = None
    by_seed: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance": self.acceptance.to_json(), "by_seed": list(self.by_seed)}


def compare_trainings(
    walks: Mapping[str, Sequence[WalkByWay]], resampling: Resampling = DEFAULT_RESAMPLING
) -> tuple[ThinkingCost, ...]:
    """Compare drafts trained on, off and mixed, on the same prompts; a row for each training and kind of prompt.

    Losses and their bounds are those of `judge_relative_loss`: seeds count in them.

    Args:
        walks: by training, for each seed, the walk by kind of prompt.

    Raises:
        DataError: no prompt was measured with all drafts.
    """
    return tuple(_measure(training, way, walks, resampling) for training in TRAININGS for way in WAYS)


def _measure(training: str, way: str, walks: Mapping[str, Sequence[WalkByWay]], resampling: Resampling) -> ThinkingCost:
    own = [one[way] for one in walks[training]]
    acceptance = summarize_acceptance(_join_seeds(own), resampling)
    if training == way:
        return ThinkingCost(training, way, acceptance)
    alone = [one[way] for one in walks[way]]
    pairs = [SeedPair(*both) for both in zip(alone, own, strict=True)]
    found = judge_relative_loss(pairs, 0.0, resampling)
    return ThinkingCost(training, way, acceptance, found.loss, found.low, found.high, found.by_seed)


def _join_seeds(walks: Sequence[Sequence[PromptAcceptance]]) -> list[PromptAcceptance]:
    """Return the counts of each prompt, summed over the seeds."""
    found: dict[str, list[PromptAcceptance]] = {}
    for walk in walks:
        for one in walk:
            found.setdefault(one.sample_id, []).append(one)
    return [sum_prompt(prompt, parts) for prompt, parts in found.items()]
