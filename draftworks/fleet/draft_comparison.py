"""The figures of two drafts on each eval set and slice, with the interval of their difference; reads records only. No torch.

A difference is that of the walk (rung 3): accepted tokens per pass of draft A minus those of draft B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.slices import LENGTH
from draftworks.errors import StoreError
from draftworks.evaluation.ladder.positions import describe_range
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import (
    AcceptanceSummary,
    Interval,
    Resampling,
    paired_difference,
    summarize_acceptance,
    unpaired_difference,
)
from draftworks.evaluation.report.slices import POSITION, Slice, iterate_slices, read_sample_columns
from draftworks.evaluation.report.walk_pairs import MeasuredWalk, WalkPair, pair_walks
from draftworks.fleet.compared_drafts import ComparedDraft, ReportPair, ReportPlace, choose_reports
from draftworks.fleet.recipe_differences import (
    Difference,
    DraftCost,
    find_data_differences,
    find_recipe_differences,
)
from draftworks.storage.names import of_eval_set
from draftworks.storage.words import format_count

CONFIDENCE = 0.95


class Kind(StrEnum):
    """How a difference was computed."""

    PAIRED = "paired"
    """On the same prompts, resampled together."""
    UNPAIRED = "unpaired"
    """On other prompts, each draft's resampled by themselves: wider, and the prompts' own difference is in it."""
    NONE = "none"
    """Not at all."""


class Verdict(StrEnum):
    """Which draft is better on an eval set, as far as its interval says."""

    A = "A accepts more"
    B = "B accepts more"
    UNCLEAR = "no clear difference"
    UNKNOWN = "not comparable"


@dataclass(frozen=True)
class SliceFigures:
    """Accepted tokens per pass of both drafts on the shared prompts of one slice."""

    column: str
    value: str
    prompts: int
    a: float | None
    b: float | None
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class EvalSetFigures:
    """Both drafts on one eval set.

    Attributes:
        a, b: the walk of each on all prompts of its report; None without a walk.
        a_draft_tokens, b_draft_tokens: tokens proposed per pass.
        shared: number of prompts that have the same tokens in both reports and a pass in both.
        shared_a, shared_b: accepted tokens per pass on these; None without any.
        reason: why the difference is not paired, or why there is none.
    """

    eval_set: str
    a: AcceptanceSummary | None = None
    b: AcceptanceSummary | None = None
    a_draft_tokens: int | None = None
    b_draft_tokens: int | None = None
    kind: Kind = Kind.NONE
    shared: int = 0
    shared_a: float | None = None
    shared_b: float | None = None
    difference: float | None = None
    interval: Interval | None = None
    reason: str = ""
    slices: tuple[SliceFigures, ...] = ()

    @property
    def verdict(self) -> Verdict:
        if self.interval is None:
            return Verdict.UNKNOWN
        return Verdict.A if self.interval.low > 0 else Verdict.B if self.interval.high < 0 else Verdict.UNCLEAR

    def describe(self) -> str:
        """Return a sentence with verdict, difference and interval."""
        if self.difference is None or self.interval is None:
            return f"{self.eval_set}: no difference is computed: {self.reason}"
        prompts = (
            f"{format_count(self.shared, 'prompt')} of both"
            if self.kind is Kind.PAIRED
            else f"other prompts, {self.reason}"
        )
        return (
            f"{self.eval_set}: {self.verdict}: {self.difference:+z.3f} accepted tokens per pass "
            f"({self.interval.low:+z.3f} to {self.interval.high:+z.3f}, {self.kind}, {prompts})"
        )


@dataclass(frozen=True)
class DraftComparison:
    """Two drafts side by side."""

    a: ComparedDraft
    b: ComparedDraft
    reports: ReportPair
    recipe: tuple[Difference, ...]
    data: tuple[Difference, ...]
    costs: tuple[DraftCost, DraftCost]
    figures: tuple[EvalSetFigures, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_of_one_draft(self) -> bool:
        """Whether A and B are the same draft, under whatever names."""
        return self.a.draft is not None and self.b.draft is not None and self.a.draft.path == self.b.draft.path

    @property
    def verdict(self) -> str:
        """Return a sentence on all eval sets together."""
        if self.is_of_one_draft:
            return "A and B are the same draft."
        compared = [one for one in self.figures if one.difference is not None]
        if not compared:
            reasons = dict.fromkeys(one.reason for one in self.figures)
            return f"The drafts cannot be compared: {'; '.join(reasons) or 'neither has a report'}."
        found = {one.verdict for one in compared}
        names = {verdict: ", ".join(one.eval_set for one in compared if one.verdict is verdict) for verdict in found}
        unpaired = any(one.kind is Kind.UNPAIRED for one in compared)
        caution = " Not on the same prompts: part of it may be theirs." if unpaired else ""
        if found == {Verdict.UNCLEAR}:
            widest = max(max(-one.interval.low, one.interval.high) for one in compared if one.interval is not None)
            return (
                f"No clear difference on {names[Verdict.UNCLEAR]}; one of more than {widest:z.3f} accepted tokens per pass "
                f"is unlikely.{caution}"
            )
        better = found & {Verdict.A, Verdict.B}
        if len(better) == 1:
            [one] = better
            rest = f"; no clear difference on {names[Verdict.UNCLEAR]}" if Verdict.UNCLEAR in found else ""
            return f"{one} on {names[one]}{rest}.{caution}"
        return f"It depends: A accepts more on {names[Verdict.A]}, B on {names[Verdict.B]}.{caution}"


def compare_drafts(a: ComparedDraft, b: ComparedDraft) -> DraftComparison:
    """Compare two drafts by their newest reports on equal eval data.

    Raises:
        StoreError: a report is damaged.
    """
    reports = choose_reports(a, b)
    refused, notes = _find_reason_not_to_subtract(a, b), list[str]()
    if not refused and a.weights_of_target != b.weights_of_target:
        notes.append(
            "The drafts were trained for other weights of the target: only prompts whose answers are the same are compared."
        )
    figures = tuple(_compare_on(name, reports, refused, bool(notes)) for name in reports.eval_sets)
    for side, place in ((a, reports.a), (b, reports.b)):
        if place is None:
            notes.append(f"{side.name} has no report yet: run the job `evaluate`.")
    costs = (DraftCost.of(a.draft), DraftCost.of(b.draft))
    return DraftComparison(
        a, b, reports, find_recipe_differences(a, b), find_data_differences(a, b), costs, figures, tuple(notes)
    )


def _find_reason_not_to_subtract(a: ComparedDraft, b: ComparedDraft) -> str:
    if a.target == b.target:
        return ""
    known = {a.weights_of_target, b.weights_of_target}
    if len(known) == 1 and None not in known:
        return ""  # one model under two names
    return f"they are drafts of different targets, {a.target} and {b.target}"


def _compare_on(eval_set: str, reports: ReportPair, refused: str, other_weights: bool) -> EvalSetFigures:
    a = None if reports.a is None else _read_walk(reports.a, eval_set)
    b = None if reports.b is None else _read_walk(reports.b, eval_set)
    resampling = Resampling(confidence=CONFIDENCE)
    found = EvalSetFigures(
        eval_set,
        _summarize(a, resampling),
        _summarize(b, resampling),
        None if a is None else a.draft_tokens,
        None if b is None else b.draft_tokens,
        reason=refused,
    )
    if refused:
        return found
    if a is None or b is None or not a.prompts or not b.prompts:
        which = "A" if a is None or not a.prompts else "B"
        return replace(found, reason=f"draft {which} has no walk on it")
    if a.draft_tokens != b.draft_tokens:
        return replace(
            found,
            reason=f"{a.draft_tokens} tokens per pass were proposed by A, {b.draft_tokens} by B: with more proposals the "
            "same draft has more accepted (set evaluation.draft_tokens)",
        )
    pair = pair_walks(a, b)
    if not pair.shared:
        reason = "no prompt has the same tokens in both reports"
        if other_weights:
            return replace(found, reason=f"{reason}, and the weights of the target are others")
        return _compare_unpaired(found, a, b, reason, resampling)
    paired = paired_difference(pair.new, pair.old, resampling)
    of_a, of_b = (micro_mean(one for one in walk if one.sample_id in pair.shared) for walk in (pair.new, pair.old))
    return replace(
        found,
        kind=Kind.PAIRED,
        shared=paired.prompts,
        shared_a=of_a,
        shared_b=of_b,
        difference=paired.difference,
        interval=paired.interval,
        slices=(
            *_compare_slices(pair, a if a.tokens is not None else b, _list_slices(reports), resampling),
            *_compare_positions(pair, a, b, resampling),
        ),
    )


def _summarize(walk: MeasuredWalk | None, resampling: Resampling) -> AcceptanceSummary | None:
    return None if walk is None or not walk.prompts else summarize_acceptance(walk.prompts, resampling)


def _compare_unpaired(
    found: EvalSetFigures, a: MeasuredWalk, b: MeasuredWalk, reason: str, resampling: Resampling
) -> EvalSetFigures:
    interval = unpaired_difference(a.prompts, b.prompts, resampling)
    if interval is None or found.a is None or found.b is None or found.a.micro is None or found.b.micro is None:
        return replace(found, reason="one of the walks has no pass")
    difference = found.a.micro - found.b.micro
    return replace(found, kind=Kind.UNPAIRED, difference=difference, interval=interval, reason=reason)


def _compare_slices(
    pair: WalkPair, with_tokens: MeasuredWalk, by: Sequence[str], resampling: Resampling
) -> tuple[SliceFigures, ...]:
    """Return the paired difference in each slice of columns that have several slices."""
    if with_tokens.tokens is None:
        return ()
    columns = read_sample_columns(with_tokens.tokens)
    of_a = [prompt for prompt in pair.new if prompt.sample_id in pair.shared]
    of_b = {prompt.sample_id: prompt for prompt in pair.old}
    found = list[SliceFigures]()
    for column in (name for name in by if name in columns):
        slices = list(iterate_slices(of_a, columns, [column]))
        if len(slices) < 2:
            continue
        found += [_compare_slice(each, of_b, resampling) for each in slices]
    return tuple(found)


def _compare_positions(
    pair: WalkPair, a: MeasuredWalk, b: MeasuredWalk, resampling: Resampling
) -> tuple[SliceFigures, ...]:
    """Return the paired difference in each range of places in the text in which both have passes of the same prompts."""
    found = list[SliceFigures]()
    for begin in sorted(a.by_position.keys() & b.by_position.keys()):
        of_a, of_b = ({one.sample_id: one for one in walk.by_position[begin]} for walk in (a, b))
        both = sorted(of_a.keys() & of_b.keys() & pair.shared)
        if both:
            found.append(
                _compare_slice(Slice(POSITION, describe_range(begin), [of_a[name] for name in both]), of_b, resampling)
            )
    return tuple(found) if len(found) > 1 else ()


def _compare_slice(one: Slice, of_b: Mapping[str, PromptAcceptance], resampling: Resampling) -> SliceFigures:
    """Return the paired difference in a slice of draft A's prompts."""
    others = [of_b[prompt.sample_id] for prompt in one.prompts]
    paired = paired_difference(one.prompts, others, resampling)
    a, b = micro_mean(one.prompts), micro_mean(others)
    low, high = paired.interval.low, paired.interval.high
    return SliceFigures(one.column, one.value, paired.prompts, a, b, paired.difference, low, high)


def _list_slices(reports: ReportPair) -> list[str]:
    """Return the columns by which either report was sliced."""
    names = dict.fromkeys([LENGTH])
    for place in (reports.a, reports.b):
        evaluation = None if place is None or place.artifact is None else place.artifact.identity.get("evaluation")
        names |= dict.fromkeys((evaluation or {}).get("slices") or ())
    return list(names)


def _read_walk(place: ReportPlace, eval_set: str) -> MeasuredWalk | None:
    """Return the walk of a report on an eval set, with the tokens if they are still there; None if it has no such set."""
    folder = place.folders.get(eval_set)
    return None if folder is None else MeasuredWalk.read(folder, _find_tokens(place, eval_set))


def _find_tokens(place: ReportPlace, eval_set: str) -> Path | None:
    if place.artifact is None or place.store is None:
        return None
    wanted = dict(place.answers).get(eval_set)
    try:
        known = place.store.list_all(of_eval_set(eval_set).responses, place.artifact.target)
    except (ValueError, StoreError):
        return None
    return next((one.path / TOKENS_FOLDER for one in known if one.data_version == wanted), None)
