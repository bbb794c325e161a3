"""One draft with thinking on and off: acceptance of each, their difference, and what one draft for both costs. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from draftworks.config.data import OFF, ON, THINKING
from draftworks.data.conversations import Scalar
from draftworks.data.slices import THINKING_PAIR
from draftworks.data.tokenized import MIXED, TokenRow
from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, sum_histograms
from draftworks.evaluation.ladder.relative_loss import SeedPair, judge_relative_loss
from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceDifference,
    AcceptanceSummary,
    Resampling,
    compare_paired,
    summarize_acceptance,
)


class AskedSample(NamedTuple):
    """How a sample was asked, `on` or `off`, and the id of its prompt, which the other way has too."""

    way: str
    prompt: str


@dataclass(frozen=True)
class ThinkingComparison:
    """Acceptance of one draft on the same prompts, asked with thinking on and off.

    Attributes:
        paired: on minus off, over the prompts that have a pass both ways.
    """

    on: AcceptanceSummary
    off: AcceptanceSummary
    paired: AcceptanceDifference

    def to_json(self) -> dict[str, Any]:
        return {ON: self.on.to_json(), OFF: self.off.to_json(), "difference": self.paired.to_json()}


def read_asked_sample(columns: Mapping[str, Scalar]) -> AskedSample | None:
    """Return how a sample with these columns was asked; None if it was not asked both ways."""
    if THINKING_PAIR not in columns:
        return None
    return AskedSample(str(columns[THINKING]), str(columns[THINKING_PAIR]))


def list_asked_samples(rows: Iterable[TokenRow]) -> dict[str, AskedSample]:
    """Return how samples were asked, by sample id; those that were not asked both ways are left out."""
    found = {row.sample_id: read_asked_sample(row.columns) for row in rows}
    return {sample_id: asked for sample_id, asked in found.items() if asked is not None}


def sum_by_prompt(
    samples: Iterable[PromptAcceptance], asked: Mapping[str, AskedSample]
) -> dict[str, list[PromptAcceptance]]:
    """Return the counts of each prompt by way, `on` and `off`.

    A conversation whose template drops earlier thoughts is a sample for each answer; these are summed, since the same prompt
    may give another number of them the other way.

    Args:
        asked: by sample id; samples that are not in it are left out.
    """
    found: dict[str, dict[str, list[PromptAcceptance]]] = {ON: {}, OFF: {}}
    for sample in samples:
        if sample.sample_id in asked:
            way, prompt = asked[sample.sample_id]
            found[way].setdefault(prompt, []).append(sample)
    return {way: [sum_prompt(prompt, parts) for prompt, parts in prompts.items()] for way, prompts in found.items()}


def compare_thinking(
    samples: Iterable[PromptAcceptance],
    asked: Mapping[str, AskedSample],
    resampling: Resampling = DEFAULT_RESAMPLING,
) -> ThinkingComparison | None:
    """Compare a draft with thinking on and off; None if no prompt has a pass both ways. Arguments as `sum_by_prompt`."""
    ways = sum_by_prompt(samples, asked)
    try:
        paired = compare_paired(ways[ON], ways[OFF], resampling)
    except DataError:  # no prompt was measured both ways
        return None
    on, off = (summarize_acceptance(ways[way], resampling) for way in (ON, OFF))
    return ThinkingComparison(on, off, paired)


def sum_prompt(prompt: str, samples: Sequence[PromptAcceptance]) -> PromptAcceptance:
    """Return the counts of several samples or drafts as those of one prompt."""
    counts = {name: sum(getattr(one, name) for one in samples) for name in ("passes", "accepted", "emitted")}
    return PromptAcceptance(prompt, **counts, histogram=sum_histograms(samples))


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
