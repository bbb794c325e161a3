"""The trained draft beside all other drafts of a report, in total, by slice and without answers in loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Resampling, compare_paired, select_measured
from draftworks.evaluation.report.figures import BaselineComparison
from draftworks.evaluation.report.rival_verdict import LostSlice, RivalVerdict
from draftworks.evaluation.report.slices import Slice, iterate_positions, iterate_slices
from draftworks.evaluation.report.summary import TRAINED
from draftworks.evaluation.rivals.loops import LOOP_SHARE

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.measurement import DraftMeasurement  # it imports torch

RIVAL_COLUMNS = {
    "rival": "object",
    "rival_micro": "float64",
    "difference": "float64",
    "difference_low": "float64",
    "difference_high": "float64",
}
"""Columns of a table of slices: the rival that accepts most there, and the trained draft's tokens minus its."""


@dataclass(frozen=True)
class RivalSlice:
    """A slice of the trained draft's walk, and the rival that accepts most in it; None if none has its prompts."""

    slice: Slice
    rival: str | None = None
    paired: AcceptanceDifference | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the whole interval of the difference lies below 0."""
        return self.paired is not None and self.paired.interval.has_width and self.paired.interval.high < 0

    def to_row(self) -> dict[str, Any]:
        """Return `RIVAL_COLUMNS`."""
        if self.paired is None:
            return dict.fromkeys(RIVAL_COLUMNS)
        found, interval = self.paired, self.paired.interval
        return dict(zip(RIVAL_COLUMNS, (self.rival, found.b, found.difference, interval.low, interval.high)))


def compare_slices(
    drafts: Mapping[str, DraftMeasurement], columns: pd.DataFrame | None, resampling: Resampling
) -> list[RivalSlice]:
    """Return every slice of the trained draft's walk, by column and by place in the text, beside the best rival there."""
    trained = drafts[TRAINED]
    others = {name: measured for name, measured in drafts.items() if name != TRAINED and measured.walk}
    found: list[RivalSlice] = []
    if columns is not None:
        walks = {name: select_measured(measured.walk) for name, measured in others.items()}
        for one in iterate_slices(trained.walk, columns, list(columns)):
            ids = [prompt.sample_id for prompt in one.prompts]
            found.append(
                _compare(one, {name: [walk[i] for i in ids if i in walk] for name, walk in walks.items()}, resampling)
            )
    for begin, one in zip(trained.walk_by_position, iterate_positions(trained.walk_by_position)):
        there = {name: measured.walk_by_position.get(begin, ()) for name, measured in others.items()}
        found.append(_compare(one, there, resampling))
    return found


def _compare(one: Slice, others: Mapping[str, Sequence[PromptAcceptance]], resampling: Resampling) -> RivalSlice:
    measured = {name: value for name, walk in others.items() if (value := micro_mean(walk)) is not None}
    if not measured:
        return RivalSlice(one)
    best = max(measured, key=lambda name: measured[name])
    if not select_measured(one.prompts).keys() & select_measured(others[best]).keys():
        return RivalSlice(one)
    return RivalSlice(one, best, compare_paired(one.prompts, others[best], resampling))


def judge_rivals(comparisons: Sequence[BaselineComparison], slices: Iterable[RivalSlice]) -> RivalVerdict | None:
    """Return the verdict on the trained draft; None where no other draft has a walk."""
    if not comparisons:
        return None
    best = max(comparisons, key=lambda one: one.paired.b)
    paired, interval = best.paired, best.paired.interval
    lost = sorted(_list_lost(slices), key=lambda one: one.accepted - one.rival_accepted)
    return RivalVerdict(
        best.other, paired.a, paired.b, interval.low, interval.high, interval.confidence, paired.prompts, tuple(lost)
    )


def _list_lost(slices: Iterable[RivalSlice]) -> Iterator[LostSlice]:
    for one in slices:
        if one.is_lost and one.paired is not None and one.rival is not None:
            paired = one.paired
            yield LostSlice(*one.slice[:2], paired.prompts, one.rival, paired.a, paired.b, paired.interval.high)


def measure_without_loops(
    drafts: Mapping[str, DraftMeasurement], repeated: Mapping[str, float]
) -> dict[str, float | None]:
    """Return accepted tokens per pass of every draft with a walk on the samples whose answers run in no loop.

    Args:
        repeated: share of repeated n-grams by sample id.
    """
    return {
        name: micro_mean(one for one in measured.walk if repeated.get(one.sample_id, 0.0) < LOOP_SHARE)
        for name, measured in drafts.items()
        if measured.walk
    }
