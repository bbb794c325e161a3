"""The rule of promotion on slices: a draft that clearly loses one of them is not promoted. Pure, torch-free.

All slices of all eval sets are one family of questions (Holm 1979): a draft that loses none of them is held back in at most
1 - CONFIDENCE of the cases, however many slices there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftworks.evaluation.ladder.statistics import adjust_by_holm
from draftworks.service.record import EvalFigures, LostSlice
from draftworks.service.rule import CONFIDENCE, Verdict
from draftworks.storage.words import format_count

if TYPE_CHECKING:
    from draftworks.evaluation.report.comparison import SliceDifference


def judge_slices(
    figures: Sequence[EvalFigures], differences: Mapping[str, Sequence[SliceDifference]], margin: float
) -> tuple[EvalFigures, ...]:
    """Return the figures with the slices that are lost. An eval set with one gets the verdict `slice_lost`, unless it has
    `worse`.

    Args:
        differences: of the slices of each eval set, against the draft that it was compared with.
        margin: accepted tokens per pass that a slice may lose, whether by chance or not.
    """
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
