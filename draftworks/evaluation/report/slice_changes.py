"""Which slices of an eval set accept less, or more, than in an earlier report: paired where prompts are shared. No torch.

Many slices are looked at, so the verdicts are Holm's: with no change at all, the chance that any slice is named is at most
1 - confidence. The intervals beside them are those of each slice by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from draftworks.data.slices import DEFAULT_MAX_WEIGHT, SLICE_COLUMNS, SlicePlan, SliceWeight, compute_weight
from draftworks.errors import DataError
from draftworks.evaluation.acceptance_length import SYMBOL, format_change, format_length
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.statistics import (
    AcceptanceDifference,
    Resampling,
    adjust_by_holm,
    compare_paired,
    compare_unpaired,
)
from draftworks.evaluation.report.comparison import (
    MeasuredWalk,
    explain_other_draft_tokens,
    find_identical_samples,
)

LEAST_PROMPTS = 20
_RESAMPLES_PER_SLICE = 40
"""2 / (resamples + 1), the smallest p-value of a bootstrap, has to be below 0.05 / slices for Holm's first step."""

Compared = Literal["paired", "unpaired", "with all"]
SliceName = tuple[str, str]
"""Column and value."""


def resample_enough(resampling: Resampling, slices: int) -> Resampling:
    """Return settings with the resamples that so many slices take: the more, the smaller a p-value has to be."""
    return replace(resampling, resamples=max(resampling.resamples, _RESAMPLES_PER_SLICE * slices))


@dataclass(frozen=True)
class SliceChange:
    """Accepted tokens per pass of one slice, before and now.

    Attributes:
        prompts: that were compared; of the new report where they are not the same prompts.
        compared: how; None with too few prompts.
        figures: `a` now and `b` before, which is of all prompts where the slice is compared `with all`.
        p_value: two-sided, after Holm's correction over all slices that were compared.
        verdict: fell, rose, no clear change, or too few prompts.
    """

    column: str
    value: str
    prompts: int
    compared: Compared | None = None
    figures: AcceptanceDifference | None = None
    p_value: float | None = None
    verdict: Literal["fell", "rose", "no clear change", "too few prompts"] = "too few prompts"

    def to_row(self) -> dict[str, str]:
        """Return the change as a row of a table."""
        found, shown = self.figures, ("", "", "", "")
        if found is not None:
            change = format_change(found.difference, found.interval.low, found.interval.high, 2)
            shown = (format_length(found.b), format_length(found.a), change, str(self.compared))
        names = (f"{SYMBOL} before", f"{SYMBOL} now", "difference", "compared")
        about = {"slice by": self.column, "value": self.value, "prompts": f"{self.prompts:,}"}
        return {**about, **dict(zip(names, shown)), "verdict": self.verdict}


class _Pair(NamedTuple):
    """The prompts of a slice in both reports."""

    compared: Compared
    new: list[PromptAcceptance]
    old: list[PromptAcceptance]

    def compare(self, resampling: Resampling) -> AcceptanceDifference:
        compare = compare_paired if self.compared == "paired" else compare_unpaired
        found = compare(self.new, self.old, resampling)
        assert found is not None, "a measured prompt has a pass"
        return found


def compare_slices(
    new: MeasuredWalk,
    old: MeasuredWalk,
    columns: Sequence[str] = SLICE_COLUMNS,
    least_prompts: int = LEAST_PROMPTS,
    only: Iterable[SliceName] | None = None,
) -> tuple[SliceChange, ...]:
    """Compare every slice of two reports on the walk (rung 3).

    A slice is compared on the prompts that have the same tokens in both reports, if there are `least_prompts` of them and
    the drafts differ. Otherwise all prompts of each report stand for the traffic of their time: that is the case of one
    draft, whose acceptance on the same prompts is the same, and of traffic with new prompts. A slice without a prompt in
    the old report is compared `with all` of that report's: with what users had then.

    Args:
        only: slices to look at, as column and value; all by default. Holm's correction is over these, and none of them is
            compared `with all`.

    Raises:
        DataError: different numbers of tokens were proposed per pass.
    """
    refused = explain_other_draft_tokens(new, old, f"in report {new.report}", f"in {old.report}")
    if refused:
        raise DataError(refused)
    assert new.tokens is not None, "of a report in a store"
    assert old.tokens is not None, "of a report in a store"
    same = find_identical_samples(new.tokens, old.tokens) if new.draft != old.draft else set[str]()
    slices = list(only) if only is not None else _list_slices(new, old, columns)
    pairs = {each: _pair(new, old, each, same, least_prompts, with_all=only is None) for each in slices}
    known = {each: pair for each, pair in pairs.items() if pair is not None}
    resampling = resample_enough(new.resampling, max(len(known), 1))
    figures = {each: pair.compare(resampling) for each, pair in known.items()}
    adjusted = dict(zip(figures, adjust_by_holm([one.p_value for one in figures.values()])))
    changes: list[SliceChange] = []
    for column, value in slices:
        pair = pairs[column, value]
        if pair is None:
            changes.append(SliceChange(column, value, len(_select(new, column, value))))
            continue
        found, p_value = figures[column, value], adjusted[column, value]
        is_clear = p_value <= 1 - resampling.confidence and found.a != found.b
        verdict = "no clear change" if not is_clear else "fell" if found.a < found.b else "rose"
        changes.append(SliceChange(column, value, found.prompts, pair.compared, found, p_value, verdict))
    return tuple(changes)


def plan_weights(changes: Iterable[SliceChange], about: SlicePlan, max_weight: float = DEFAULT_MAX_WEIGHT) -> SlicePlan:
    """Return the plan with a weight for each slice that fell; slices that rose or did not change have none.

    Args:
        about: names of target, strategy, eval set and reports.
    """
    weights = []
    for one in changes:
        if one.verdict == "fell" and (found := one.figures) is not None:
            weight = compute_weight(found.b, found.a, max_weight)
            weights.append(SliceWeight(one.column, one.value, weight, found.b, found.a))
    return replace(about, max_weight=max_weight, weights=tuple(weights))


def _list_slices(new: MeasuredWalk, old: MeasuredWalk, columns: Sequence[str]) -> list[SliceName]:
    """Return the slices of columns with more than one value in both reports together, by column and value."""
    known = [one.slice_columns[name] for one in (new, old) for name in one.measured]
    values = {column: {found[column] for found in known if column in found} for column in columns}
    return [(column, value) for column in columns if len(values[column]) > 1 for value in sorted(values[column])]


def _select(walk: MeasuredWalk, column: str, value: str) -> set[str]:
    """Return the ids of the prompts of a slice."""
    return {name for name in walk.measured if walk.slice_columns[name].get(column) == value}


def _pair(
    new: MeasuredWalk, old: MeasuredWalk, which: SliceName, same: set[str], least: int, with_all: bool
) -> _Pair | None:
    of_new, of_old = _select(new, *which), _select(old, *which)
    shared, compared = of_new & of_old & same, "unpaired"
    if len(shared) >= least and new.draft != old.draft:
        compared, of_new, of_old = "paired", shared, shared
    elif with_all and not of_old:
        compared, of_old = "with all", set(old.measured)
    if min(len(of_new), len(of_old)) < max(least, 1):
        return None
    return _Pair(compared, [new.measured[name] for name in of_new], [old.measured[name] for name in of_old])
