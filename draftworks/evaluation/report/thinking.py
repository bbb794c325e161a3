"""One draft with thinking on and off: acceptance of each, and their difference prompt by prompt. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from draftworks.config.data import OFF, ON, THINKING
from draftworks.data.conversations import Scalar
from draftworks.data.slices import THINKING_PAIR
from draftworks.data.tokenized import TokenRow
from draftworks.errors import DataError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, sum_histograms
from draftworks.evaluation.ladder.statistics import (
    DEFAULT_RESAMPLING,
    AcceptanceSummary,
    PairedDifference,
    Resampling,
    paired_difference,
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
    paired: PairedDifference

    def to_json(self) -> dict[str, Any]:
        return {ON: self.on.to_json(), OFF: self.off.to_json(), "difference": asdict(self.paired)}


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
        paired = paired_difference(ways[ON], ways[OFF], resampling)
    except DataError:  # no prompt was measured both ways
        return None
    on, off = (summarize_acceptance(ways[way], resampling) for way in (ON, OFF))
    return ThinkingComparison(on, off, paired)


def sum_prompt(prompt: str, samples: Sequence[PromptAcceptance]) -> PromptAcceptance:
    """Return the counts of several samples or drafts as those of one prompt."""
    counts = {name: sum(getattr(one, name) for one in samples) for name in ("passes", "accepted", "emitted")}
    return PromptAcceptance(prompt, **counts, histogram=sum_histograms(samples))
