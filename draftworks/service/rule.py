"""The rule of promotion: on every eval set, and every large slice, not inferior to the best draft in service. Torch-free.

A draft is promoted if, on every eval set, the lower bound of the paired 95% interval of (new - best) of the walk's
accepted tokens per pass is at least -margin, and no slice is lost (`judge_slices`). Best is the best draft that was ever in
service for these weights of the target, not the one in service now, so small losses do not add up over many promotions.

How drafts compare with each other is known from the figures of their own promotions: each has a strength, that of the
draft it was compared with plus the measured difference. Where the best draft cannot be compared any more, since the eval
data has changed, the strongest one that can be compared stands for it, and the distance between these two is carried: it
counts as lost already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from draftworks.service.register import EvalFigures, InService, LostSlice
from draftworks.storage.words import format_count

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.statistics import AcceptanceDifference
    from draftworks.evaluation.report.comparison import SliceDifference


CONFIDENCE = 0.95
NO_WIDTH = "the difference is the same on every prompt, so nothing shows what it is on others: measure on other prompts"
MAX_PROMPTS = 1_000_000
"""A number of prompts above this is as good as none."""


class Verdict(StrEnum):
    """The verdict of one eval set."""

    FIRST = "first"
    """Nothing was in service that was measured on it."""
    NON_INFERIOR = "non_inferior"
    WORSE = "worse"
    """The whole interval is below -margin."""
    SLICE_LOST = "slice_lost"
    """A slice of the prompts is clearly lost, whatever the others say."""
    UNDECIDED = "undecided"

    @property
    def accepts(self) -> bool:
        return self in (Verdict.FIRST, Verdict.NON_INFERIOR)


@dataclass(frozen=True)
class Compared:
    """A draft that was in service, compared with the new one on an eval set.

    Attributes:
        paired: of the new draft minus this one; None if they cannot be compared.
        value, reference_value: accepted tokens per pass of the new draft and of this one, on the shared prompts.
        reason: why they cannot be compared.
        same_weights: whether they are one draft, which cannot differ from itself.
    """

    paired: AcceptanceDifference | None = None
    value: float | None = None
    reference_value: float | None = None
    reason: str = ""
    same_weights: bool = False


@dataclass(frozen=True)
class Ranked:
    """A draft that was in service for the present weights of the target.

    Attributes:
        strength: accepted tokens per pass over the first of them, as known from their promotions.
    """

    digest: str
    strength: float


@dataclass(frozen=True)
class Margins:
    """Losses that the rule allows.

    Attributes:
        margin: accepted tokens per pass that a new draft may have less than the best one.
        least_prompts: below this number of shared prompts nothing is decided.
    """

    margin: float
    least_prompts: int


def rank_earlier(history: Sequence[InService], target_digest: str, eval_set: str) -> list[Ranked]:
    """Return the drafts that were in service for these weights of the target, the strongest first on this eval set.

    A draft whose promotion has no comparison on the eval set (the rule was overruled, or the set is newer) counts as
    equal to the best one before it. Of equal drafts the newest is first.
    """
    strengths: dict[str, float] = {}
    for record in history:
        draft = record.draft
        if draft.target_digest != target_digest or draft.digest in strengths:
            continue
        found = next((one for one in record.figures if one.eval_set == eval_set), None)
        if found is not None and found.difference is not None and found.reference in strengths:
            strengths[draft.digest] = strengths[found.reference] + found.difference
        else:
            strengths[draft.digest] = max(strengths.values(), default=0.0)
    newest_first = [Ranked(digest, strength) for digest, strength in reversed(strengths.items())]
    return sorted(newest_first, key=lambda one: -one.strength)


def was_measured(history: Sequence[InService], target_digest: str, eval_set: str) -> bool:
    """Whether a draft that was in service for these weights was promoted with figures of this eval set."""
    records = [record for record in history if record.draft.target_digest == target_digest]
    return any(one.eval_set == eval_set for record in records for one in record.figures)


def judge_eval_set(
    eval_set: str, ranked: Sequence[Ranked], compared: Mapping[str, Compared], margins: Margins, is_known: bool
) -> EvalFigures:
    """Return the verdict on one eval set.

    Args:
        ranked: the drafts that were in service, the strongest first.
        compared: their comparison with the new draft, by digest; drafts after the first comparable one may be left out.
        is_known: whether one of them was measured on this eval set when it was promoted.
    """
    usable = [one for one in ranked if one.digest in compared and compared[one.digest].paired is not None]
    if not usable:
        if not ranked:
            return EvalFigures(eval_set, Verdict.FIRST, margins.margin, "no draft was in service for these weights")
        if not is_known:
            return EvalFigures(eval_set, Verdict.FIRST, margins.margin, "no draft in service was measured on it")
        reasons = dict.fromkeys(found.reason for found in compared.values() if found.reason)
        return EvalFigures(eval_set, Verdict.UNDECIDED, margins.margin, "; ".join(reasons) or "not compared")
    reference = usable[0]
    found = compared[reference.digest]
    paired = found.paired
    assert paired is not None
    carried = max(0.0, ranked[0].strength - reference.strength)
    judged = _judge(paired, carried, margins, found.same_weights)
    return EvalFigures(
        eval_set,
        judged.verdict,
        margins.margin,
        judged.reason,
        reference.digest,
        found.value,
        found.reference_value,
        paired.difference,
        paired.interval.low,
        paired.interval.high,
        carried,
        paired.prompts,
    )


def count_prompts_to_decide(paired: AcceptanceDifference, carried: float, margin: float) -> int | None:
    """Return about how many prompts would decide, if the difference stays as it is; None if more, up to a million, would not.

    The interval's width goes with one over the root of the number of prompts.
    """
    distance = paired.difference - carried + margin
    width = paired.difference - paired.interval.low
    if distance <= 0:
        return None
    ratio = width / distance
    wanted = paired.prompts * ratio * ratio
    return max(paired.prompts, math.ceil(wanted)) if wanted <= MAX_PROMPTS else None


def describe_figures(found: EvalFigures) -> str:
    """Return one line about an eval set: verdict, difference, interval, margin, reference."""
    if found.difference is None or found.low is None or found.high is None:
        return f"{found.eval_set}: {found.verdict.replace('_', '-')}: {found.reason}"
    carried = f", which is {found.carried:.3f} behind the best one" if found.carried else ""
    said = f"{found.eval_set}: {found.verdict.replace('_', '-')}: {found.difference:+.3f} accepted tokens per pass "
    said += f"({found.low:+.3f} to {found.high:+.3f}, {format_count(found.prompts, 'prompt')}) "
    said += f"against draft {found.reference}{carried}; "
    return said + f"allowed {-found.margin:+.3f}" + (f"; {found.reason}" if found.reason else "")


class _Judged(NamedTuple):
    verdict: Verdict
    reason: str = ""


def _judge(paired: AcceptanceDifference, carried: float, margins: Margins, same_weights: bool) -> _Judged:
    low, high = paired.interval.low - carried, paired.interval.high - carried
    missing = margins.least_prompts - paired.prompts
    if missing > 0:
        needed = f"at least {margins.least_prompts} are needed: {missing} more"
        return _Judged(Verdict.UNDECIDED, f"{format_count(paired.prompts, 'shared prompt')}, {needed}")
    if not paired.interval.has_width and not same_weights:
        return _Judged(Verdict.UNDECIDED, NO_WIDTH)
    if low >= -margins.margin:
        return _Judged(Verdict.NON_INFERIOR)
    if high < -margins.margin:
        return _Judged(Verdict.WORSE)
    needed = count_prompts_to_decide(paired, carried, margins.margin)
    if needed is None:
        return _Judged(Verdict.UNDECIDED, "the difference itself is below what is allowed: train a better draft")
    return _Judged(Verdict.UNDECIDED, f"about {format_count(needed, 'prompt')} would decide, if the difference stays")


def judge_slices(
    figures: Sequence[EvalFigures], differences: Mapping[str, Sequence[SliceDifference]], margin: float
) -> tuple[EvalFigures, ...]:
    """Return the figures with the slices that are lost. An eval set with one gets the verdict `slice_lost`, unless it has
    `worse`.

    Args:
        differences: of the slices of each eval set, against the draft that it was compared with.
        margin: accepted tokens per pass that a slice may lose, whether by chance or not.
    """
    from draftworks.evaluation.ladder.statistics import adjust_by_holm  # it imports numpy, and sensors read this module

    asked = [(name, one) for name, found in differences.items() for one in found]
    adjusted = adjust_by_holm([one.p_value for _, one in asked])
    lost: dict[str, list[LostSlice]] = {}
    for (name, one), p_value in zip(asked, adjusted):
        if one.difference < -margin and p_value <= 1 - CONFIDENCE:
            found = LostSlice(one.column, one.value, one.prompts, one.difference, one.low, one.high, p_value)
            lost.setdefault(name, []).append(found)
    return tuple(_add_lost(one, lost.get(one.eval_set, ()), margin) for one in figures)


def _add_lost(figures: EvalFigures, lost: Sequence[LostSlice], margin: float) -> EvalFigures:
    if not lost:
        return figures
    verdict = figures.verdict if figures.verdict == Verdict.WORSE else Verdict.SLICE_LOST
    named = "; ".join(_describe(one) for one in lost)
    reason = f"{named} (a slice may lose {margin:g})"
    return replace(
        figures, verdict=verdict, reason="; ".join(filter(None, [figures.reason, reason])), slices=tuple(lost)
    )


def _describe(one: LostSlice) -> str:
    interval = f"{one.low:+.3f} to {one.high:+.3f}, {format_count(one.prompts, 'prompt')}"
    return f"{one.column} {one.value} loses {-one.difference:.3f} ({interval})"
