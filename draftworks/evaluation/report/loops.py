"""What a report's markdown says of rung 4 beside its figures: when it was timed, and whether the walk foretold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.report.files import DIFFERENCES
from draftworks.evaluation.report.text import decoding, table

SHOWN = 12


def loops_section(drafts: Mapping[str, DraftMeasurement]) -> str:
    """Empty where no draft was on rung 4."""
    loops = [loop for measured in drafts.values() for loop in measured.loops if loop.prompts]
    parts = [_occasions(loops), *(_compared(loop) for loop in loops if loop.differences is not None)]
    return "\n\n".join(part for part in parts if part)


def _occasions(loops: Iterable[LoopMeasurement]) -> str:
    """A loop that was measured before keeps the speed it had then."""
    told = [
        f"{decoding(loop.temperature)} on {loop.occasion.device}, {loop.occasion.date:%Y-%m-%d %H:%M %Z}"
        for loop in loops
        if loop.occasion is not None
    ]
    return f"Rung 4 was timed: {'; '.join(told)}." if told else ""


def _compared(loop: LoopMeasurement) -> str:
    """Of each prompt the first answer, which is the one that a loop decodes."""
    found, prompts = loop.differences or (), f"{len(loop.prompts):,} prompts"
    courses = "Walk and greedy loop (rungs 3 and 4) on the first answer of every prompt"
    if not found:
        return f"{courses}: none of {prompts} differ."
    told = (
        f"{courses}: {len(found):,} of {prompts} differ. A gap between the two largest logits that is as small as "
        "rounding is a tie that either may win; a wider one is not."
    )
    more = len(found) - SHOWN
    shown = table([_row(one) for one in found[:SHOWN]])
    return "\n\n".join([told, shown, *([f"{more:,} more are in `{DIFFERENCES}`."] if more > 0 else [])])


def _row(one: Difference) -> dict[str, str]:
    what = "answer" if one.pass_number is None else f"proposal of pass {one.pass_number}, same answer"
    return {
        "prompt that differs": one.sample_id,
        "in": what,
        "at token (from 0)": str(one.position),
        "walk": _token(one.walk),
        "loop": _token(one.loop),
        "top-2 gap": "unknown" if one.gap is None else f"{one.gap:.2g} ({one.whose})",
    }


def _token(token: int | None) -> str:
    return "ended" if token is None else str(token)
