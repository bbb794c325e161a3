"""Markdown form of a report: headline, drafts by rung, eval data, slices, explanation of the rungs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from draftworks.config.decoding import GREEDY, describe_servers
from draftworks.evaluation.acceptance_length import (
    NAME,
    NOTE,
    STORED_NOTE,
    SYMBOL,
    format_change,
    format_interval,
    format_length,
    name_metric,
)
from draftworks.evaluation.labels import NEAR_TIE, Exactness, LabelCounts
from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.measurement import DraftMeasurement, LoopMeasurement
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean, sum_histograms
from draftworks.evaluation.ladder.rungs import RUNG_MEANINGS
from draftworks.evaluation.report.findings import WALK, Finding
from draftworks.evaluation.report.late_fall import find_late_fall
from draftworks.evaluation.report.markdown_tables import render_table
from draftworks.evaluation.report.report import NOT_MEASURED, Report
from draftworks.evaluation.report.sampled import RATES_RULE, describe_contexts, describe_rules
from draftworks.evaluation.report.slices import POSITION
from draftworks.evaluation.report.summary import DIFFERENCES, SLICES, TRAINED
from draftworks.evaluation.report.tables import select_slices_to_show

LENGTHS_NOTE = f"{NOTE} {STORED_NOTE} Intervals are over prompts."

VOCABULARY_NOTE = (
    "The first of these rates and the loss look at those only, so both get better as the vocabulary gets smaller: between "
    "vocabularies, compare the second, the accuracies and the rungs."
)
POSITION_NOTE = f"Slices by `{POSITION}` are of passes, by the place in the sample of the first token proposed: a long answer is in several."
MAX_SHOWN_DIFFERENCES = 12
MAX_CELL_LENGTH = 40


def render_report(report: Report) -> str:
    """Return the report as Markdown."""
    parts = [
        _render_headline(report),
        _render_comparisons(report),
        _render_rungs(report),
        _render_rules(report),
        _render_rates(report),
        _render_eval_data(report),
        _render_exactness(report),
        render_loops(report.drafts),
        _render_thinking(report),
        _render_slices(report),
        _render_histogram(report),
        _render_meanings(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _render_headline(report: Report) -> str:
    title = f"**{report.strategy}** draft of **{report.target}** on `{report.eval_set}`"
    found = report.headline
    acceptance, length = found.acceptance, f"{NAME} **{format_length(found.value)}**, {name_metric(found.metric)}"
    if acceptance is None:
        return f"{title}: {length}"
    interval = f"{acceptance.confidence:.0%} interval {_format_interval(acceptance)}"
    return ", ".join([f"{title}: {length}, {interval}", *_format_speed_ups(report)])


def _format_speed_ups(report: Report) -> list[str]:
    """Return the speed-ups of the trained draft, one text per temperature."""
    loops = [found for found in report.findings if found.draft == TRAINED and found.rung == 4]
    return [
        f"{_format_speed_up(loop.speed_up)} as fast as plain decoding "
        f"({_describe_decoding(loop)}, {loop.acceptance.prompts:,} prompts)"
        for loop in loops
        if loop.acceptance is not None
    ]


def _render_comparisons(report: Report) -> str:
    """Return the differences between the trained draft and the others on the walk."""
    parts = []
    for comparison in report.comparisons:
        paired = comparison.paired
        parts.append(
            f"{format_change(paired.difference, paired.interval.low, paired.interval.high, 2)} against {comparison.other}"
        )
    return f"Difference of {SYMBOL} on the walk, prompt by prompt: {'; '.join(parts)}." if parts else ""


def _table(rows: Iterable[Mapping[str, str]]) -> str:
    return render_table(rows, max_cell_length=MAX_CELL_LENGTH)


def _describe_decoding(found: Finding) -> str:
    """Return how a loop chose its tokens: `greedy`, or `temperature 0.7, greedy_draft as vLLM 0.33`."""
    decoding = found.decoding or GREEDY
    return f"{decoding.describe()}{_describe_rule(found, ', ')}"


def _describe_rule(found: Finding, before: str) -> str:
    """Return the rule of a number above temperature 0, and the servers that it is of; else an empty text."""
    return "" if found.rule is None else f"{before}{found.rule} as {found.servers}"


def _describe_servers(found: Finding) -> str:
    """Return the servers whose rule a number above temperature 0 is by; else an empty text."""
    return "" if found.rule is None else f" as {found.servers}"


def _render_rungs(report: Report) -> str:
    """Return a table with a row per draft and a column per number."""
    return _table([_draft_row(name, report.findings) for name in report.drafts])


def _draft_row(draft: str, findings: Iterable[Finding]) -> dict[str, str]:
    found = [each for each in findings if each.draft == draft]
    accuracies = _format_percentages(each.value for each in found if each.rung == 0 and each.value is not None)
    row = {"draft": draft, "accuracy % by position (rung 0)": accuracies}
    for each in found:
        if each.rung == 1:
            row[f"{_title(each.metric)}{_describe_servers(each)}"] = format_length(each.value)
        if each.rung > 1:
            row[f"{_title(each.metric)}{_describe_servers(each)}"] = _format_length(each)
        if each.rung == 4:
            row[f"speed-up ({_describe_decoding(each)})"] = _format_speed_up(each.speed_up)
    return row


def _render_rules(report: Report) -> str:
    """Return what the rules of acceptance are above temperature 0, and over which contexts rung 1 was computed there."""
    sampled = [found for found in report.findings if found.decoding is not None and found.rule is not None]
    if not sampled:
        return ""
    rules = describe_rules({found.rule: found.servers for found in sampled if found.rule is not None})
    contexts = describe_contexts(
        (each.decoding for each in sampled if each.rung == 1 and each.decoding), report.answers
    )
    lines = "\n".join(f"* {line}" for line in rules)
    return "\n\n".join(part for part in (f"Above temperature 0 a metric names its rule.\n\n{lines}", contexts) if part)


def _title(metric: str) -> str:
    """Return the heading of a column of acceptance lengths."""
    return f"{SYMBOL}, {name_metric(metric)}"


def _render_rates(report: Report) -> str:
    """Return the acceptance rates of rejection sampling, for the drafts where they were measured."""
    rows, coverage = [], 0.0
    for name, measured in report.drafts.items():
        rates = measured.result.acceptance_rates
        if rates is None or rates.unconditional is None:
            continue
        coverage = rates.coverage or 0.0
        rows.append(
            {
                "draft": name,
                "acceptance rate % by position, where the label is in the draft's vocabulary": _format_percentages(
                    rates.conditional
                ),
                "over all positions": _format_percentages(rates.unconditional),
            }
        )
    if not rows:
        return ""
    rule = f"`{RATES_RULE}` ({describe_servers(report.strategy, RATES_RULE)})"
    return (
        f"{_table(rows)}\n\nThese rates are of {rule}, at temperature 1. The draft's vocabulary has {_format_share(coverage)} of "
        f"the labels. {VOCABULARY_NOTE}"
    )


def _format_percentages(shares: Iterable[float]) -> str:
    return " · ".join(f"{100 * share:.1f}" for share in shares)


def _render_eval_data(report: Report) -> str:
    """Return how much eval data is behind the headline."""
    parts = [f"{report.drafts[TRAINED].result.supervised_tokens:,} supervised tokens"]
    acceptance = report.headline.acceptance
    if acceptance is not None:
        parts.append(f"{acceptance.prompts:,} prompts")
        parts.append(f"{acceptance.passes:,} passes of up to {report.draft_tokens} draft tokens")
    missing = [f"{count:,} {NOT_MEASURED[name]}" for name, count in report.provenance.get("not_measured", {}).items()]
    return f"Measured on {', '.join(parts)}." + (f" Of the eval set {'; '.join(missing)}." if missing else "")


def _render_exactness(report: Report) -> str:
    """Return whether rungs 2 and 3 equal what serving would accept."""
    share, exactness = report.label_agreement, report.exactness
    if not any(found.rung in (2, 3) for found in report.findings):
        return ""
    if share is None:
        return "Rungs 2 and 3 are exact only if every answer token is the target's own argmax: not checked here."
    if exactness is Exactness.EXACT:
        return "Rungs 2 and 3 are exact: every answer token is the target's own argmax."
    if exactness is Exactness.ROUNDING:
        return _render_rounding(share, report.labels)
    warning = f"> **Warning: rungs 2 and 3 are not exact here.** Of the answer tokens {_format_share(share)} are the target's own argmax"
    if exactness is Exactness.UNEXPLAINED:
        return (
            f"{warning}, although the target wrote them, greedily. {_describe_differing(report.labels)} That is more than "
            "rounding explains: does the engine compute otherwise where it answers than where its features are captured?"
        )
    return f"{warning}, and all have to be: regenerate the answers greedily with this target."


def _render_rounding(share: float, labels: LabelCounts | None) -> str:
    """Return the note for greedy answers of the target whose near ties were decided otherwise when they were captured."""
    most = (
        "" if labels is None else f" Each is decided in one pass, so at most {labels.differing:,} passes are concerned."
    )
    return (
        f"Rungs 2 and 3 are exact but for rounding: the target wrote the answers, greedily, and {_format_share(share)} of their "
        f"tokens are its argmax in the captured features too. {_describe_differing(labels)} Features, or activations, of two "
        f"bytes decide near ties either way.{most}"
    )


def _describe_differing(labels: LabelCounts | None) -> str:
    """Return how many tokens differ, and how many of them are near ties."""
    if labels is None:
        return ""
    return (
        f"Of {labels.tokens:,} tokens {labels.differing:,} differ, {labels.near_ties:,} of them by a gap between the two logits "
        f"of at most 1/{round(1 / NEAR_TIE)}, which is two steps of bfloat16."
    )


def _render_thinking(report: Report) -> str:
    """Return the walk with thinking on and off, and the difference on the same prompts."""
    found = report.thinking
    if found is None:
        return ""
    paired = found.paired
    difference = format_change(paired.difference, paired.interval.low, paired.interval.high, 2)
    measured = (("on", found.on), ("off", found.off))
    rows = [
        {
            "thinking": way,
            "prompts": f"{one.prompts:,}",
            "passes": f"{one.passes:,}",
            f"{_title(WALK)}, {TRAINED}": _format_with_interval(one.micro, one),
        }
        for way, one in measured
    ]
    return (
        f"{_table(rows)}\n\nThinking on against off, prompt by prompt: {difference} on {paired.prompts:,} prompts that were "
        "asked both ways."
    )


def _render_slices(report: Report) -> str:
    """Return the walk by columns of the eval data, and by place in the text, where there is more than one slice."""
    shown, left_out = select_slices_to_show(report.walk_slices)
    parts = [_table([_slice_row(one) for one in shown.itertuples()])]
    parts += [
        f"The largest slices by `{column}`, and {count:,} more in `{SLICES}`." for column, count in left_out.items()
    ]
    parts.append(_render_absent_columns(report))
    if POSITION in set(shown["column"]):
        parts.append(POSITION_NOTE)
        fall = find_late_fall(report.drafts[TRAINED].walk_by_position, report.resampling)
        parts += [] if fall is None else [f"> {fall.describe()}"]
    return "\n\n".join(part for part in parts if part)


def _render_absent_columns(report: Report) -> str:
    if not report.absent_columns:
        return ""
    names = ", ".join(f"`{name}`" for name in report.absent_columns)
    return f"No slices by {names}: no sample of this eval set has such a column."


def _slice_row(one: Any) -> dict[str, str]:
    return {
        "slice by": one.column,
        "value": one.value,
        "prompts": f"{one.prompts:,}",
        "passes": f"{one.passes:,}",
        f"{_title(WALK)}, {TRAINED}": _format_with_interval(one.micro, one) if one.passes else "none",
    }


def _render_histogram(report: Report) -> str:
    """Return the share of passes of each walk by the number of accepted draft tokens, in percent."""
    rows = []
    for name, measured in report.drafts.items():
        counts = sum_histograms(measured.walk)
        if any(counts):
            shares = {str(length): f"{100 * count / sum(counts):.0f}" for length, count in enumerate(counts)}
            nothing = {str(length): "0" for length in range(report.draft_tokens + 1)}
            rows.append({"% of passes of the walk by draft tokens accepted": name, **nothing, **shares})
    return _table(rows)


def _render_meanings(report: Report) -> str:
    """Return the explanations of the rungs that were measured."""
    measured = sorted({found.rung for found in report.findings})
    lines = [f"* **Rung {rung}.** {RUNG_MEANINGS[rung]}" for rung in measured]
    return "\n".join(lines + [f"* {LENGTHS_NOTE}"] * (measured[-1] > 1))


def _format_length(found: Finding) -> str:
    return format_length(None) if found.value is None else _format_with_interval(found.value, found.acceptance)


def _format_with_interval(value: float | None, measured: Any) -> str:
    """Format a value with its interval. Over one prompt it is left out: a width of 0 would look like certainty."""
    interval = "" if value is None or measured.prompts == 1 else f" ({_format_interval(measured)})"
    return f"{format_length(value)}{interval}"


def _format_interval(measured: Any) -> str:
    return format_interval(measured.low, measured.high, between="–")


def _format_speed_up(speed_up: float | None) -> str:
    return "none" if speed_up is None else f"{speed_up:.2f}×"


def _format_share(share: float) -> str:
    """Format a share as a percentage, rounded down so that only all is 100%."""
    return f"{math.floor(share * 10_000) / 100:.2f}%"


def render_loops(drafts: Mapping[str, DraftMeasurement]) -> str:
    """Return when rung 4 was timed and where it differs from the walk; empty if it was not measured."""
    loops = [loop for measured in drafts.values() for loop in measured.loops if loop.prompts]
    parts = [
        _render_loop_prompts(drafts),
        _render_timing(loops),
        *(_render_differences(loop) for loop in loops if loop.differences is not None),
    ]
    return "\n\n".join(part for part in parts if part)


def _render_loop_prompts(drafts: Mapping[str, DraftMeasurement]) -> str:
    """Return what the walk is on the prompts that a greedy loop decoded, where these are not all: only so they compare."""
    parts = []
    for name, measured in drafts.items():
        decoded = {
            prompt.sample_id for loop in measured.loops if not loop.decoding.temperature for prompt in loop.prompts
        }
        same = [prompt for prompt in measured.walk if prompt.sample_id in decoded]
        if same and len(same) < len(measured.walk):
            parts.append(
                f"The greedy loop decoded {len(same):,} of the {len(measured.walk):,} prompts; on these the walk of `{name}` has "
                f"{SYMBOL} {format_length(micro_mean(same))}."
            )
    return " ".join(parts)


def _render_timing(loops: Iterable[LoopMeasurement]) -> str:
    """Return when and where each loop was timed; a cached loop keeps its earlier timing."""
    parts = [
        f"{loop.decoding.describe()}{'' if loop.decoding.rule is None else f', {loop.decoding.rule},'} on "
        f"{loop.timing_context.device}, {loop.timing_context.date:%Y-%m-%d %H:%M %Z}"
        for loop in loops
        if loop.timing_context is not None
    ]
    return f"Rung 4 was timed: {'; '.join(parts)}." if parts else ""


def _render_differences(loop: LoopMeasurement) -> str:
    """Return the differences between loop and walk on each prompt's first answer, the one that a loop decodes."""
    found, prompts = loop.differences or (), f"{len(loop.prompts):,} prompts"
    compared = "Walk and greedy loop (rungs 3 and 4) on the first answer of every prompt"
    if not found:
        return f"{compared}: none of {prompts} differ."
    summary = (
        f"{compared}: {len(found):,} of {prompts} differ. A gap between the two largest logits that is as small as "
        "rounding is a tie that either may win; a wider one is not."
    )
    more = len(found) - MAX_SHOWN_DIFFERENCES
    shown = _table([_difference_row(one) for one in found[:MAX_SHOWN_DIFFERENCES]])
    return "\n\n".join([summary, shown, *([f"{more:,} more are in `{DIFFERENCES}`."] if more > 0 else [])])


def _difference_row(one: Difference) -> dict[str, str]:
    what = "answer" if one.pass_number is None else f"proposal of pass {one.pass_number}, same answer"
    return {
        "prompt that differs": one.sample_id,
        "in": what,
        "at token (from 0)": str(one.position),
        "walk": _format_token(one.walk),
        "loop": _format_token(one.loop),
        "top-2 gap": "unknown" if one.gap is None else f"{one.gap:.2g} ({one.whose})",
    }


def _format_token(token: int | None) -> str:
    return "ended" if token is None else str(token)
