"""Views of what logged requests accept: a table of slices with notes, as text, Markdown, JSON and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from draftworks.evaluation.acceptance_length import (
    NOTE,
    SYMBOL,
    count_own_token,
    format_change,
    format_interval,
    format_length,
)
from draftworks.evaluation.ladder.statistics import AcceptanceDifference
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.report.slice_changes import SliceChange
from draftworks.production.promised import PromptAgreement
from draftworks.production.request_log import AHEAD, NO_COUNTS, OTHER_MODEL, OTHER_SERVER
from draftworks.production.served_logs import ServedLogs
from draftworks.production.served_slices import WITH_ALL, ServedRatio, ServedSlice, ServedStanding
from draftworks.storage.words import format_count, list_names

COLUMNS: tuple[str, ...] = (
    "slice by",
    "value",
    "requests",
    f"{SYMBOL} now",
    f"{SYMBOL} first hours",
    "difference",
    "verdict",
    f"{SYMBOL} walk (rung 3)",
    "now - walk",
)
CAPTION = (
    f"{NOTE} By the counts of each request (rung 6), with 95% intervals over requests; first hours: of the same draft. "
    "Fell and rose are corrected for looking at many slices (Holm). The walk is another rung, over the prompts of the eval set "
    "in the same slice."
)
MOST_ROWS, MOST_PROMPTS = 40, 10
OTHER_DEPTH = 0.5
"""Difference of proposed tokens per pass from which on acceptance does not compare."""
_LEAST_SHARE = 0.005
REMEDIES = {
    NO_COUNTS: "start vLLM with --per-request-spec-decode-metrics detailed, or ask SGLang with return_spec_tokens_details",
    OTHER_MODEL: "if it is the target under another name, give that as observation.requests.model",
    OTHER_SERVER: "set observation.requests.strategy, or name the server in `servers`",
    AHEAD: "set the clocks",
}


def title(target: str, standing: ServedStanding) -> str:
    return f"requests of {target}, {standing.strategy}, draft {standing.draft}"


def list_rows(standing: ServedStanding) -> list[tuple[str, ...]]:
    """Return the cells of the slices that have a request in the last hours, those that fell first, in the order of COLUMNS.

    Of very many the first MOST_ROWS; a note says so.
    """
    return [_format_row(each) for each in islice(_list_measured(standing), MOST_ROWS)]


def _list_measured(standing: ServedStanding) -> list[ServedSlice]:
    return [each for each in standing.slices if each.now is not None]


def _format_row(found: ServedSlice) -> tuple[str, ...]:
    change = _format_difference(found.change)
    return (
        found.column or "all",
        found.value,
        "0" if found.now is None else f"{found.now.count:,}",
        _format_ratio(found.now),
        _format_ratio(found.first) if found.compared != WITH_ALL or found.change is None else _format_all(found.change),
        change,
        "" if found.first is None and found.change is None else found.verdict,
        _format_ratio(found.promised),
        _format_difference(found.beside),
    )


def _format_ratio(found: ServedRatio | None) -> str:
    if found is None:
        return ""
    if found.interval is None:
        return f"{format_length(found.value, 3)} (no interval)"
    return f"{format_length(found.value, 3)} ({format_interval(found.interval.low, found.interval.high, 3)})"


def _format_all(change: AcceptanceDifference) -> str:
    return f"{format_length(change.b, 3)} (all)"


def _format_difference(found: AcceptanceDifference | None) -> str:
    return "" if found is None else format_change(found.difference, found.interval.low, found.interval.high)


def list_notes(standing: ServedStanding) -> list[str]:
    """Return what a reader of the table has to know, the slices that fell first."""
    notes = _count_more(len(_list_measured(standing)) - MOST_ROWS, "slice")
    if standing.baseline_over:
        fallen = list_names([each.name for each in standing.fallen]) if standing.fallen else "none"
        notes.append(f"fell: {fallen}")
    else:
        notes.append("the first hours of this draft are not over: nothing to compare with yet")
    notes += [standing.problem] if standing.problem else []
    promise = standing.promise
    if promise is not None:
        notes.append(f"walk: report {promise.report}, eval set {promise.eval_set}")
        if standing.proposed is not None and abs(standing.proposed - promise.walk.draft_tokens) > OTHER_DEPTH:
            notes.append(
                f"servers propose {standing.proposed:.1f} tokens per pass, the report {promise.walk.draft_tokens}: the walk does "
                "not compare"
            )
        if standing.sampled > _LEAST_SHARE:
            notes.append(
                f"{standing.sampled:.0%} of the requests are above temperature 0, or do not say it; the walk is greedy"
            )
    notes += [] if standing.prompts is None else _describe_prompts(standing.prompts)
    return [*notes, *_describe_apart(standing.apart, "request")]


def _describe_prompts(found: PromptAgreement) -> list[str]:
    said = f"{format_count(found.requests, 'request')} of prompts of the eval set"
    left_out = [
        f"{count:,} {what}"
        for count, what in (
            (found.sampled, "not at temperature 0"),
            (found.other_answer, "with an answer of another length, or not of all turns"),
        )
        if count
    ]
    said += f" ({', '.join(left_out)})" if left_out else ""
    if found.paired is None:
        return [f"{said}: none can be compared with the walk"]
    paired = found.paired
    change = format_change(paired.difference, paired.interval.low, paired.interval.high)
    notes = [
        f"{said}: {found.equal:,} of {format_count(found.prompts, 'prompt')} have the walk's counts exactly; {SYMBOL} served "
        f"{format_length(paired.a, 3)}, promised {format_length(paired.b, 3)}, difference {change}, prompt by prompt"
    ]
    notes += [
        f"prompt {one.sample}: {one.served[1]:,} tokens accepted in {one.served[0]:,} passes, promised {one.promised[1]:,} in "
        f"{one.promised[0]:,}"
        for one in islice(found.differences, MOST_PROMPTS)
    ]
    return [*notes, *_count_more(len(found.differences) - MOST_PROMPTS, "prompt")]


def _count_more(number: int, what: str) -> list[str]:
    return [f"and {format_count(number, f'more {what}')}, see --json"] if number > 0 else []


def _describe_apart(apart: Mapping[str, int], what: str) -> list[str]:
    """Return how many are in no figure by reason, the most first, with what helps."""
    ordered = sorted(apart.items(), key=lambda each: -each[1])
    return [f"{format_count(n, what)} {why}{f': {REMEDIES[why]}' if why in REMEDIES else ''}" for why, n in ordered]


def list_log_notes(logs: ServedLogs) -> list[str]:
    """Return what was read, and which lines are in no table, by the reason."""
    reading = logs.reading
    used = sum(len(table) for table in reading.requests.values())
    said = f"{format_count(reading.files, 'log')}, {format_count(reading.lines, 'line')}: {used:,} used"
    notes = [*reading.remarks, said, *_describe_apart(reading.apart, "line")]
    if reading.skipped:
        notes.append(f"{reading.skipped:,} older lines were not read: raise observation.requests.max_lines")
    if logs.assumed:
        notes.append(
            f"{format_count(logs.assumed, 'line')} without a draft: it is taken to be the one that was in service at their time"
        )
    return notes


def render_markdown(target: str, logs: ServedLogs) -> str:
    """Return the tables with their notes as Markdown."""
    parts = []
    for one in logs.standings:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in list_rows(one)]
        notes = "\n".join(f"* {each}" for each in list_notes(one))
        parts.append(f"**{title(target, one)}**\n\n{render_table(rows, COLUMNS)}\n\n{CAPTION}\n\n{notes}\n")
    return "\n".join([*parts, "\n".join(f"* {each}" for each in list_log_notes(logs))]) + "\n"


def to_slice_changes(standing: ServedStanding) -> tuple[SliceChange, ...]:
    """Return the slices as those of two reports are told, those that fell first."""
    return tuple(
        SliceChange(
            column=each.column,
            value=each.value,
            prompts=0 if each.now is None else each.now.count,
            compared=None if each.compared is None else "with all" if each.compared == WITH_ALL else "unpaired",
            figures=each.change,
            p_value=each.p_value,
            verdict="too few prompts" if each.verdict == "too few requests" else each.verdict,
        )
        for each in standing.slices
        if each.column
    )


def to_json(logs: ServedLogs) -> dict[str, Any]:
    """Return the figures for programs; values are accepted tokens per pass, without the target's own."""
    reading = logs.reading
    return {
        "files": reading.files,
        "lines": reading.lines,
        "skipped": reading.skipped,
        "apart": dict(reading.apart),
        "assumed_drafts": logs.assumed,
        "remarks": list(reading.remarks),
        "strategies": [_standing_to_json(each) for each in logs.standings],
    }


def _standing_to_json(standing: ServedStanding) -> dict[str, Any]:
    promise = standing.promise
    return {
        "strategy": standing.strategy,
        "draft": standing.draft,
        **{name: datetime.fromtimestamp(getattr(standing, name), UTC).isoformat() for name in ("since", "until")},
        "baseline_over": standing.baseline_over,
        "fell": [each.name for each in standing.fallen],
        "slices": [asdict(each) for each in standing.slices],
        "promised": None if promise is None else {"report": promise.report, "eval_set": promise.eval_set},
        "problem": standing.problem,
        "prompts": None if standing.prompts is None else asdict(standing.prompts),
        "proposed": standing.proposed,
        "sampled": standing.sampled,
        "apart": dict(standing.apart),
    }


def select_figures(standings: Sequence[ServedStanding]) -> dict[str, float]:
    """Return the acceptance length of all requests, and how many slices fell, for plots over time."""
    found: dict[str, float] = {}
    for one in standings:
        whole = one.slices[0]
        if whole.now is not None:
            found["acceptance_length_requests"] = count_own_token(whole.now.value)
        if whole.change is not None:
            found["difference_requests"] = whole.change.difference
            found["fallen_slices"] = float(len(one.fallen))
    return found
