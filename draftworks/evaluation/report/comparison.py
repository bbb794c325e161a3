"""Comparison of a draft with the one it replaces: the walks of two reports, on the prompts of both. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from draftworks.data.tokenized import TokenizedSet
from draftworks.errors import StoreError
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean
from draftworks.evaluation.ladder.statistics import PairedDifference, Resampling, paired_difference
from draftworks.evaluation.report.findings import WALK
from draftworks.evaluation.report.walk_pairs import MeasuredWalk, WalkPair, pair_walks
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.records import ReportIdentity
from draftworks.storage.words import format_count
from draftworks.targets.registry import HELDOUT


@dataclass(frozen=True)
class ReplacedDraftComparison:
    """Result of comparing a draft with the one it replaces, on the walk (rung 3).

    Attributes:
        new, old: the reports; `old` is None for a first draft.
        paired: accepted tokens per pass, the new draft's minus the old one's; None if they cannot be compared.
        reason: why they cannot be compared.
    """

    new: Artifact
    old: Artifact | None
    paired: PairedDifference | None = None
    reason: str = ""

    @property
    def is_worse(self) -> bool:
        """Whether the whole interval of the difference lies below 0."""
        return self.paired is not None and self.paired.interval.high < 0

    def describe(self) -> str:
        if self.paired is None:
            return f"nothing to compare: {self.reason}"
        low, high = self.paired.interval.low, self.paired.interval.high
        verdict = "fewer are accepted" if self.is_worse else "more are accepted" if low > 0 else "no clear difference"
        return (
            f"{self.paired.difference:+.3f} accepted tokens per pass ({low:+.3f} to {high:+.3f}) compared with the "
            f"draft before it, on {format_count(self.paired.prompts, 'prompt')} measured with both: {verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the difference and the identities of both drafts; entries without a value are absent."""
        drafts = {"draft": ReportIdentity.of(self.new).draft, "report": str(self.new.path)}
        if self.old is not None:
            drafts |= {"draft_before": ReportIdentity.of(self.old).draft, "report_before": str(self.old.path)}
        if self.paired is None:
            return drafts
        return {
            "metric": WALK,
            "difference": self.paired.difference,
            "low": self.paired.interval.low,
            "high": self.paired.interval.high,
            "confidence": self.paired.interval.confidence,
            "prompts": self.paired.prompts,
            **drafts,
        }


def compare_with_replaced_draft(artifacts: ArtifactStore, asset: str, target: str) -> ReplacedDraftComparison:
    """Compare the draft of the current report with the newest earlier draft that has other weights, on `heldout`.

    A prompt counts if its tokens and loss mask are the same in both reports: an answer that was generated again keeps
    the id of its conversation, but is other eval data. Reports with different numbers of tokens proposed per pass do
    not compare: with more proposals the same draft has more accepted.

    Raises:
        StoreError: there is no report, or the current report or its eval data is missing or damaged.
    """
    new = artifacts.load_current(asset, target)
    old = find_previous_report(artifacts, new)
    if old is None:
        return ReplacedDraftComparison(new, None, reason=_explain_no_previous(artifacts, new))
    found = compare_reports(artifacts, new, old, HELDOUT)
    return ReplacedDraftComparison(new, old, found.paired, found.reason)


@dataclass(frozen=True)
class ComparedWalks:
    """Two walks on the prompts of both, the eval data of the new one, and the settings of intervals."""

    pair: WalkPair
    tokens: TokenizedSet
    resampling: Resampling


@dataclass(frozen=True)
class WalkComparison:
    """The walks of two reports on one eval set, on the prompts of both.

    Attributes:
        paired: accepted tokens per pass, the new draft's minus the old one's; None if they cannot be compared.
        new, old: accepted tokens per pass of each draft on these prompts.
        reason: why they cannot be compared.
        walks: what was compared; None if they cannot be.
    """

    paired: PairedDifference | None = None
    new: float | None = None
    old: float | None = None
    reason: str = ""
    walks: ComparedWalks | None = None


def compare_reports(
    artifacts: ArtifactStore, new: Artifact, old: Artifact, eval_set: str, confidence: float | None = None
) -> WalkComparison:
    """Compare the walks of two reports on one eval set, see `compare_with_replaced_draft` for the prompts that count.

    Args:
        confidence: level of the interval; that of the new report by default.

    Raises:
        StoreError: the new report or its eval data is missing or damaged.
    """
    measured = MeasuredWalk.of(artifacts, new, eval_set)
    try:
        before = MeasuredWalk.of(artifacts, old, eval_set)
    except StoreError as error:
        return WalkComparison(reason=f"the report before it cannot be used: {error}")
    if measured.draft_tokens != before.draft_tokens:
        return WalkComparison(reason=_explain_other_draft_tokens(measured.draft_tokens, before.draft_tokens))
    pair = pair_walks(measured, before)
    shared = pair.shared
    if not shared:
        kind = "held-out prompt" if eval_set == HELDOUT else f"prompt of {eval_set}"
        return WalkComparison(reason=f"no {kind} has the same tokens in both reports and a pass in both")
    resampling = measured.resampling if confidence is None else replace(measured.resampling, confidence=confidence)
    new_mean, old_mean = (
        micro_mean(prompt for prompt in one if prompt.sample_id in shared) for one in (pair.new, pair.old)
    )
    assert measured.tokens is not None, "of a report in a store"
    walks = ComparedWalks(pair, measured.tokens, resampling)
    return WalkComparison(paired_difference(pair.new, pair.old, resampling), new_mean, old_mean, walks=walks)


def find_previous_report(artifacts: ArtifactStore, report: Artifact) -> Artifact | None:
    """Return the newest report before this one whose draft has other weights."""
    earlier = (found for found in _of_other_drafts(artifacts, report) if found.created < report.created)
    return next(earlier, None)


def _of_other_drafts(artifacts: ArtifactStore, report: Artifact) -> Iterator[Artifact]:
    """Yield the reports of the same target and strategy whose draft has other weights, newest first."""
    draft = ReportIdentity.of(report).draft
    reports = artifacts.list_all(report.asset, report.target)
    return (found for found in reports if ReportIdentity.of(found).draft != draft)


def _explain_no_previous(artifacts: ArtifactStore, report: Artifact) -> str:
    if any(_of_other_drafts(artifacts, report)):
        return "it was measured before every other known draft: an older draft is current again"
    return "it is the first draft of this target and strategy"


def _explain_other_draft_tokens(now: int, before: int) -> str:
    return (
        f"{now} tokens per pass were proposed now, {before} in the report before it. Set evaluation.draft_tokens to "
        "compare drafts that propose different numbers by themselves"
    )
