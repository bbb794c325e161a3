"""A report as a person reads it, in a few glances: the number, the drafts beside each other, where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import sum_histograms
from draftworks.evaluation.ladder.rungs import RUNG_MEANINGS
from draftworks.evaluation.report.findings import WALK, Finding
from draftworks.evaluation.report.markdown_tables import render_table
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import DIFFERENCES, TRAINED
from draftworks.evaluation.report.tables import select_slices_to_show

LENGTHS_NOTE = "Lengths count draft tokens; tokens per pass count the target's own token too. Intervals are by bootstrap over prompts."

VOCABULARY_NOTE = (
    "The first of these rates and the loss look at those only, so both get better as the vocabulary gets smaller: between "
    "vocabularies, compare the second, the accuracies and the rungs."
)
MAX_SHOWN_DIFFERENCES = 12
MAX_CELL_LENGTH = 40


def render_report(report: Report) -> str:
    """Headline, drafts by rungs, slices, histogram, what the rungs mean."""
    parts = [
        _headline(report),
        _comparisons(report),
        _rungs_table(report),
        _rates_table(report),
        _context(report),
        _exactness(report),
        render_loops(report.drafts),
        _slices_table(report),
        _histogram_table(report),
        _meanings(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(report: Report) -> str:
    title = f"**{report.strategy}** draft of **{report.target}** on `{report.eval_set}`"
    found = report.headline
    acceptance = found.acceptance
    if acceptance is None:
        return f"{title}: `{found.metric}` **{_number(found.value)}** (rung {found.rung})"
    length = f"**{_number(found.value)}** draft tokens accepted per pass of the target"
    interval = f"{acceptance.confidence:.0%} interval {_interval(acceptance)}, `{found.metric}`"
    per_pass = f"{_number(acceptance.tokens_per_pass)} tokens per pass"
    return ", ".join([f"{title}: {length} ({interval})", per_pass, *_speed_ups(report)])


def _speed_ups(report: Report) -> list[str]:
    """Of the trained draft, by temperature."""
    loops = [found for found in report.findings if found.draft == TRAINED and found.rung == 4]
    return [
        f"{_times(loop.speed_up)} as fast as plain decoding ({_describe_decoding(loop.temperature)}, {loop.acceptance.prompts:,} prompts)"
        for loop in loops
    ]


def _comparisons(report: Report) -> str:
    """What the trained draft has over the others, on the walk."""
    told = []
    for comparison in report.comparisons:
        paired = comparison.paired
        interval = f"{paired.interval.low:+.2f} to {paired.interval.high:+.2f}"
        told.append(f"{paired.difference:+.2f} ({interval}) against {comparison.other}")
    return f"On the walk, prompt by prompt: {'; '.join(told)}." if told else ""


def _table(rows: Iterable[Mapping[str, str]]) -> str:
    return render_table(rows, max_cell_length=MAX_CELL_LENGTH)


def _describe_decoding(temperature: float | None) -> str:
    """Return how a loop chose its tokens: `greedy` or `temperature 0.7`."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def _rungs_table(report: Report) -> str:
    """A row per draft, a column per number."""
    return _table([_draft_row(name, report.findings) for name in report.drafts])


def _draft_row(draft: str, findings: Iterable[Finding]) -> dict[str, str]:
    found = [each for each in findings if each.draft == draft]
    accuracies = _percentages(each.value for each in found if each.rung == 0)
    row = {"draft": draft, "accuracy % by position (rung 0)": accuracies}
    for each in found:
        if each.rung == 1:
            row[f"{each.metric} (rung 1)"] = _number(each.value)
        if each.rung > 1:
            row[each.metric] = _length(each)
        if each.metric == WALK and each.value is not None:
            row["tokens per pass (walk)"] = _number(each.acceptance.tokens_per_pass)
        if each.rung == 4:
            row[f"speed-up ({_describe_decoding(each.temperature)})"] = _times(each.speed_up)
    return row


def _rates_table(report: Report) -> str:
    """Acceptance of sampling, of the drafts that it was counted for."""
    rows, coverage = [], None
    for name, measured in report.drafts.items():
        rates = measured.result.acceptance_rates
        if rates is None or rates.unconditional is None:
            continue
        coverage = rates.coverage
        rows.append(
            {
                "draft": name,
                "acceptance rate % by position, where the label is in the draft's vocabulary": _percentages(
                    rates.conditional
                ),
                "over all positions": _percentages(rates.unconditional),
            }
        )
    if not rows:
        return ""
    return f"{_table(rows)}\n\nThe draft's vocabulary has {_rounded_down(coverage)} of the labels. {VOCABULARY_NOTE}"


def _percentages(shares: Iterable[float]) -> str:
    return " · ".join(f"{100 * share:.1f}" for share in shares)


def _context(report: Report) -> str:
    """What the headline was measured on."""
    told = [f"{report.drafts[TRAINED].result.supervised_tokens:,} supervised tokens"]
    acceptance = report.headline.acceptance
    if acceptance is not None:
        told.append(f"{acceptance.prompts:,} prompts")
        told.append(f"{acceptance.passes:,} passes of up to {report.draft_tokens} draft tokens")
    return f"Measured on {', '.join(told)}."


def _exactness(report: Report) -> str:
    """Whether rungs 2 and 3 say what serving would accept."""
    share = report.label_agreement
    if not any(found.rung in (2, 3) for found in report.findings):
        return ""
    if share is None:
        return "Rungs 2 and 3 are exact only if every answer token is the target's own argmax: not checked here."
    if share >= 1:
        return "Rungs 2 and 3 are exact: every answer token is the target's own argmax."
    return (
        f"> **Warning: rungs 2 and 3 are not exact here.** Of the answer tokens {_rounded_down(share)} are the target's own argmax,"
        " and all have to be: regenerate the answers greedily with this target."
    )


def _slices_table(report: Report) -> str:
    """The walk by columns of the eval data, where a column has more than one slice."""
    return _table([_slice_row(one) for one in select_slices_to_show(report.walk_slices).itertuples()])


def _slice_row(one: Any) -> dict[str, str]:
    return {
        "slice by": one.column,
        "value": one.value,
        "prompts": f"{one.prompts:,}",
        "passes": f"{one.passes:,}",
        f"{WALK}, {TRAINED}": _with_interval(one.micro, one) if one.passes else "none",
    }


def _histogram_table(report: Report) -> str:
    """Of every walk, how many of a hundred passes accepted so many draft tokens."""
    rows = []
    for name, measured in report.drafts.items():
        counts = sum_histograms(measured.walk)
        if any(counts):
            shares = {str(length): f"{100 * count / sum(counts):.0f}" for length, count in enumerate(counts)}
            nothing = {str(length): "0" for length in range(report.draft_tokens + 1)}
            rows.append({"% of passes of the walk that accepted": name, **nothing, **shares})
    return _table(rows)


def _meanings(report: Report) -> str:
    """Of the rungs that are there."""
    measured = sorted({found.rung for found in report.findings})
    lines = [f"* **Rung {rung}.** {RUNG_MEANINGS[rung]}" for rung in measured]
    return "\n".join(lines + [f"* {LENGTHS_NOTE}"] * (measured[-1] > 1))


def _length(found: Finding) -> str:
    return "none" if found.value is None else _with_interval(found.value, found.acceptance)


def _with_interval(value: float, measured: Any) -> str:
    """Over one prompt an interval has no width, which would look like certainty."""
    return _number(value) if measured.prompts == 1 else f"{_number(value)} ({_interval(measured)})"


def _interval(measured: Any) -> str:
    return f"{_number(measured.low)}–{_number(measured.high)}"


def _number(value: float) -> str:
    return f"{value:.2f}"


def _times(speed_up: float) -> str:
    return f"{speed_up:.2f}×"


def _rounded_down(share: float) -> str:
    """So that nothing but all of them is called 100%."""
    return f"{math.floor(share * 10_000) / 100:.2f}%"


def render_loops(drafts: Mapping[str, DraftMeasurement]) -> str:
    """Empty where no draft was on rung 4."""
    loops = [loop for measured in drafts.values() for loop in measured.loops if loop.prompts]
    parts = [_occasions(loops), *(_compared(loop) for loop in loops if loop.differences is not None)]
    return "\n\n".join(part for part in parts if part)


def _occasions(loops: Iterable[LoopMeasurement]) -> str:
    """A loop that was measured before keeps the speed it had then."""
    told = [
        f"{_describe_decoding(loop.temperature)} on {loop.timing_context.device}, {loop.timing_context.date:%Y-%m-%d %H:%M %Z}"
        for loop in loops
        if loop.timing_context is not None
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
    more = len(found) - MAX_SHOWN_DIFFERENCES
    shown = _table([_row(one) for one in found[:MAX_SHOWN_DIFFERENCES]])
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
