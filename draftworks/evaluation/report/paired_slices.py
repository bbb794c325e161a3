"""What a draft loses in slices of the prompts that it shares with another one, each slice examined by itself. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftworks.data.tokenized import TokenizedSet
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import Resampling, examine_paired, subtract_paired
from draftworks.evaluation.report.slice_changes import LEAST_PROMPTS, RESAMPLES_PER_SLICE
from draftworks.evaluation.report.slices import iterate_slices, read_sample_columns
from draftworks.evaluation.report.walk_pairs import WalkPair


@dataclass(frozen=True)
class PairedSlice:
    """The prompts of a slice, measured with both drafts, in the same order."""

    column: str
    value: str
    new: tuple[PromptAcceptance, ...]
    old: tuple[PromptAcceptance, ...]


@dataclass(frozen=True)
class SliceDifference:
    """Accepted tokens per pass of the new draft minus those of the old one in a slice.

    Attributes:
        p_value: two-sided, of no difference; without a correction for other slices.
    """

    column: str
    value: str
    prompts: int
    difference: float
    low: float
    high: float
    p_value: float


def list_paired_slices(
    pair: WalkPair, tokens: TokenizedSet, by: Sequence[str], least_prompts: int = LEAST_PROMPTS
) -> tuple[PairedSlice, ...]:
    """Return the slices with enough prompts that have a pass in both walks.

    Args:
        tokens: eval data of one of the walks, with the columns.
        by: columns to slice by. Those that the data lacks, and those with one slice only, give none.
    """
    shared = pair.shared
    new = [prompt for prompt in pair.new if prompt.sample_id in shared]
    old = {prompt.sample_id: prompt for prompt in pair.old}
    columns = read_sample_columns(tokens)
    found: list[PairedSlice] = []
    for column in (name for name in by if name in columns):
        slices = list(iterate_slices(new, columns, [column]))
        found += [
            PairedSlice(one.column, one.value, tuple(one.prompts), tuple(old[each.sample_id] for each in one.prompts))
            for one in slices
            if len(slices) > 1 and len(one.prompts) >= least_prompts
        ]
    return tuple(found)


def examine_slice(one: PairedSlice, of: int, resampling: Resampling) -> SliceDifference:
    """Return the difference in a slice.

    Args:
        of: number of slices that are looked at: the more, the smaller a p-value has to be, and the more resamples it takes.
    """
    enough = replace(resampling, resamples=max(resampling.resamples, RESAMPLES_PER_SLICE * of))
    tested = examine_paired(one.new, one.old, enough)
    return SliceDifference(
        one.column,
        one.value,
        len(one.new),
        subtract_paired(one.new, one.old).value,
        tested.interval.low,
        tested.interval.high,
        tested.p_value,
    )
