"""Which slices of an eval set accept less, or more, than in an earlier report: paired where prompts are shared. No torch.

Many slices are looked at, so the verdicts are Holm's: with no change at all, the chance that any slice is named is at most
1 - confidence. The intervals beside them are those of each slice by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from draftworks.data.slices import DEFAULT_MAX_WEIGHT, SLICE_COLUMNS, SlicePlan, SliceWeight, compute_weight
from draftworks.errors import DataError
from draftworks.evaluation.acceptance_length import SYMBOL, format_change, format_length
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import (
    Interval,
    Resampling,
    Tested,
    adjust_by_holm,
    examine_paired,
    examine_unpaired,
)

LEAST_PROMPTS = 20
RESAMPLES_PER_SLICE = 40
"""2 / (resamples + 1), the smallest p-value of a bootstrap, has to be below 0.05 / slices for Holm's first step."""

Compared = Literal["paired", "unpaired", "with all"]


@dataclass(frozen=True)
class MeasuredPrompts:
    """The walk of one report on one eval set, prompt by prompt.

    Attributes:
        report: name of the report.
        draft: version of the draft's weights.
        draft_tokens: tokens proposed per pass.
        prompts: those with a pass, by sample id.
        contents: digest of tokens and loss mask of every sample.
        columns: slice columns of every sample.
    """

    report: str
    draft: str
    draft_tokens: int
    prompts: Mapping[str, PromptAcceptance]
    contents: Mapping[str, str]
    columns: Mapping[str, Mapping[str, str]]
    resampling: Resampling

    def select(self, column: str, value: str) -> set[str]:
        """Return the ids of the prompts of a slice."""
        return {name for name in self.prompts if self.columns[name].get(column) == value}


@dataclass(frozen=True)
class SliceChange:
    """Accepted tokens per pass of one slice, before and now.

    Attributes:
        compared: how; None with too few prompts.
        prompts: that were compared; of the new report where they are not the same prompts.
        before, after: of the slice; `before` of all prompts where the slice is compared `with all`.
        p_value: two-sided, after Holm's correction over all slices that were compared.
        verdict: fell, rose, no clear change, or too few prompts.
    """

    column: str
    value: str
    prompts: int
    compared: Compared | None = None
    before: float | None = None
    after: float | None = None
    interval: Interval | None = None
    p_value: float | None = None
    verdict: Literal["fell", "rose", "no clear change", "too few prompts"] = "too few prompts"

    @property
    def difference(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before

    def to_row(self) -> dict[str, str]:
        """Return the change as a row of a table."""
        difference, interval = self.difference, self.interval
        figures = ("", "", "", "")
        if difference is not None and interval is not None:
            change = format_change(difference, interval.low, interval.high, 2)
            figures = (format_length(self.before), format_length(self.after), change, str(self.compared))
        names = (f"{SYMBOL} before", f"{SYMBOL} now", "difference", "compared")
        about = {"slice by": self.column, "value": self.value, "prompts": f"{self.prompts:,}"}
        return {**about, **dict(zip(names, figures)), "verdict": self.verdict}


class _Pair(NamedTuple):
    """The prompts of a slice in both reports, in one order where they are the same."""

    compared: Compared
    old: list[PromptAcceptance]
    new: list[PromptAcceptance]


def compare_slices(
    new: MeasuredPrompts,
    old: MeasuredPrompts,
    columns: Sequence[str] = SLICE_COLUMNS,
    least_prompts: int = LEAST_PROMPTS,
    only: Iterable[tuple[str, str]] | None = None,
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
    if new.draft_tokens != old.draft_tokens:
        raise DataError(
            f"{new.draft_tokens} tokens per pass were proposed in report {new.report}, {old.draft_tokens} in {old.report}: they "
            "do not compare. Set evaluation.draft_tokens"
        )
    slices = list(only) if only is not None else _list_slices(new, old, columns)
    pairs = {each: _pair(new, old, each, least_prompts, with_all=only is None) for each in slices}
    known = {each: pair for each, pair in pairs.items() if pair is not None}
    needed = RESAMPLES_PER_SLICE * max(len(known), 1)
    resampling = replace(new.resampling, resamples=max(new.resampling.resamples, needed))
    tests = {each: _test(pair, resampling) for each, pair in known.items()}
    adjusted = dict(zip(tests, adjust_by_holm([one.p_value for one in tests.values()])))
    alpha = 1 - resampling.confidence
    found = []
    for column, value in slices:
        pair = pairs[column, value]
        if pair is None:
            found.append(SliceChange(column, value, len(new.select(column, value))))
            continue
        test, p_value = tests[column, value], adjusted[column, value]
        before, after = micro_mean(pair.old), micro_mean(pair.new)
        assert before is not None, "a measured prompt has a pass"
        assert after is not None
        named = "no clear change" if p_value > alpha or after == before else "fell" if after < before else "rose"
        compared = (pair.compared, before, after, test.interval, p_value)
        found.append(SliceChange(column, value, len(pair.new), *compared, verdict=named))
    return tuple(found)


def plan_weights(changes: Iterable[SliceChange], about: SlicePlan, max_weight: float = DEFAULT_MAX_WEIGHT) -> SlicePlan:
    """Return the plan with a weight for each slice that fell; slices that rose or did not change have none.

    Args:
        about: names of target, strategy, eval set and reports.
    """
    weights = []
    for one in changes:
        if one.verdict == "fell" and one.before is not None and one.after is not None:
            weight = compute_weight(one.before, one.after, max_weight)
            weights.append(SliceWeight(one.column, one.value, weight, one.before, one.after))
    return replace(about, max_weight=max_weight, weights=tuple(weights))


def _test(pair: _Pair, resampling: Resampling) -> Tested:
    """Return the interval of new - old and its two-sided p-value."""
    examine = examine_paired if pair.compared == "paired" else examine_unpaired
    return examine(pair.new, pair.old, resampling)


def _list_slices(new: MeasuredPrompts, old: MeasuredPrompts, columns: Sequence[str]) -> list[tuple[str, str]]:
    """Return the slices of columns with more than one value in both reports together, by column and value."""
    found: dict[str, set[str]] = {column: set() for column in columns}
    for one in (new, old):
        for name in one.prompts:
            for column, value in one.columns[name].items():
                if column in found:
                    found[column].add(value)
    return [(column, value) for column in columns if len(found[column]) > 1 for value in sorted(found[column])]


def _pair(
    new: MeasuredPrompts, old: MeasuredPrompts, which: tuple[str, str], least: int, with_all: bool
) -> _Pair | None:
    of_new, of_old = new.select(*which), old.select(*which)
    shared = sorted(name for name in of_new & of_old if new.contents[name] == old.contents[name])
    if len(shared) >= least and new.draft != old.draft:
        return _Pair("paired", [old.prompts[name] for name in shared], [new.prompts[name] for name in shared])
    compared: Compared = "unpaired"
    if with_all and not of_old:
        compared, of_old = "with all", set(old.prompts)
    if min(len(of_new), len(of_old)) < max(least, 1):
        return None
    return _Pair(
        compared, [old.prompts[name] for name in sorted(of_old)], [new.prompts[name] for name in sorted(of_new)]
    )
