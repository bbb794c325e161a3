"""The one comparison of two drafts: the walks of two saved reports, in total and by slice, on the prompts of both. No torch.

A prompt counts if its tokens and loss mask are the same in both reports: an answer that was generated again keeps the id of
its conversation, but is other eval data. Walks with different numbers of tokens proposed per pass do not compare: with more
proposals the same draft has more accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftworks.config.decoding import Decoding
from draftworks.config.run_files import TOKENS_FOLDER
from draftworks.data.slices import select_slice_columns
from draftworks.data.tokenized import TokenizedSet, TokenRow
from draftworks.errors import StoreError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, PromptsByPosition, describe_range
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Resampling, compare_paired, select_measured
from draftworks.evaluation.report.figures import WALK, get_metric_name
from draftworks.evaluation.report.slices import POSITION, iterate_slices, read_sample_columns
from draftworks.evaluation.report.summary import REPORT, TRAINED, read_report, report_file_errors, require_prompts_file
from draftworks.evaluation.report.tables import PromptsByRung, read_prompts, select_walk_by_position
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import of_eval_set
from draftworks.storage.records import ReportIdentity
from draftworks.storage.words import format_count
from draftworks.targets.registry import HELDOUT


@dataclass(frozen=True)
class MeasuredWalk:
    """The parts of a saved report that are compared with another one.

    Attributes:
        prompts: walk of the trained draft; empty if it was not measured.
        draft_tokens: tokens proposed per pass.
        answers: content version of the eval data; None if the report does not name it.
        tokens: eval data of the walk; None if it is not there any more.
        by_position: the walk in every range of places in the text; empty in a report from before there were any.
        report, draft: name of the report and version of the draft's weights; empty where a folder is all that is known.
    """

    prompts: tuple[PromptAcceptance, ...]
    draft_tokens: int
    resampling: Resampling
    answers: str | None = None
    tokens: Sequence[TokenRow] | None = None
    by_position: PromptsByPosition = field(default_factory=dict)
    report: str = ""
    draft: str = ""

    @classmethod
    def of(cls, artifacts: ArtifactStore, report: Artifact, eval_set: str) -> MeasuredWalk:
        """Read them from a saved report, with its eval data.

        Raises:
            StoreError: the report or its eval data is missing or damaged.
        """
        found = cls.read(report.path / eval_set, find_eval_answers(artifacts, report, eval_set).path / TOKENS_FOLDER)
        return replace(found, report=report.path.name, draft=ReportIdentity.of(report).draft)

    @classmethod
    def read(cls, folder: Path, tokens: Path | None) -> MeasuredWalk:
        """Read them from the folder of a report on one eval set.

        Args:
            tokens: folder of the eval data, if that is there.

        Raises:
            StoreError: a file of the report or of the eval data is missing or damaged.
        """
        values = read_report(folder)
        with report_file_errors(folder / REPORT):
            draft_tokens, resampling = values["draft_tokens"], Resampling(**values["resampling"])
            answers = values["provenance"].get("eval_tokens")
        opened = None if tokens is None else TokenizedSet.open(tokens)
        prompts = _read_prompts(folder)
        return cls(
            prompts.get((TRAINED, WALK), ()),
            draft_tokens,
            resampling,
            answers if opened is None else opened.digest,
            opened,
            select_walk_by_position(prompts, TRAINED),
        )

    @cached_property
    def measured(self) -> dict[str, PromptAcceptance]:
        """The prompts with a pass, by sample id."""
        return select_measured(self.prompts)

    @cached_property
    def slice_columns(self) -> dict[str, dict[str, str]]:
        """The columns by which prompts are told apart, by sample id."""
        return {row.sample_id: select_slice_columns(row.columns) for row in self.tokens or ()}


@dataclass(frozen=True)
class PairedSlice:
    """The prompts of a slice, measured with both drafts."""

    column: str
    value: str
    new: Sequence[PromptAcceptance]
    old: Sequence[PromptAcceptance]

    def compare(self, resampling: Resampling) -> SliceDifference:
        found = compare_paired(self.new, self.old, resampling)
        interval = (found.interval.low, found.interval.high)
        return SliceDifference(
            self.column, self.value, found.prompts, found.a, found.b, found.difference, *interval, found.p_value
        )


@dataclass(frozen=True)
class SliceDifference:
    """Accepted tokens per pass of the new draft minus those of the old one in a slice.

    Attributes:
        a, b: of the new draft and of the old one.
        p_value: two-sided, of no difference; without a correction for other slices.
    """

    column: str
    value: str
    prompts: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class WalkPair:
    """Two walks on one eval set, and the settings of intervals."""

    new: MeasuredWalk
    old: MeasuredWalk
    resampling: Resampling

    @cached_property
    def same(self) -> set[str]:
        """Ids of the prompts with the same tokens and loss mask.

        Where the eval data of one is gone, the prompts are the same if both name the same version of it, else none is.
        """
        if self.new.tokens is not None and self.old.tokens is not None:
            return find_identical_samples(self.new.tokens, self.old.tokens)
        if self.new.answers is not None and self.new.answers == self.old.answers:
            return {prompt.sample_id for prompt in self.new.prompts}
        return set()

    @cached_property
    def shared(self) -> frozenset[str]:
        """Ids of the same prompts that have a pass in both."""
        return frozenset(self.new.measured.keys() & self.old.measured.keys() & self.same)

    def compare(self) -> AcceptanceDifference:
        """Return the new draft minus the old one. Raises DataError without a shared prompt."""
        new, old = (self._select(walk.prompts, self.same) for walk in (self.new, self.old))
        return compare_paired(new, old, self.resampling)

    def list_slices(self, by: Sequence[str], least_prompts: int = 1) -> list[PairedSlice]:
        """Return the slices with enough shared prompts.

        Args:
            by: columns to slice by. Those that the data lacks, and those with one slice only, give none.
        """
        tokens = self.new.tokens if self.new.tokens is not None else self.old.tokens
        if tokens is None:
            return []
        columns, new = read_sample_columns(tokens), self._select(self.new.prompts, self.shared)
        found: list[PairedSlice] = []
        for column in (name for name in by if name in columns):
            slices = list(iterate_slices(new, columns, [column]))
            enough = (one for one in slices if len(slices) > 1 and len(one.prompts) >= least_prompts)
            found += [PairedSlice(one.column, one.value, one.prompts, self._find_old(one.prompts)) for one in enough]
        return found

    def list_positions(self) -> list[PairedSlice]:
        """Return the ranges of places in the text, if several, in which both have passes of the same prompts."""
        found: list[PairedSlice] = []
        for begin in sorted(self.new.by_position.keys() & self.old.by_position.keys()):
            new, old = (self._select(walk.by_position[begin], self.shared) for walk in (self.new, self.old))
            if {one.sample_id for one in new} & {one.sample_id for one in old}:
                found.append(PairedSlice(POSITION, describe_range(begin), new, old))
        return found if len(found) > 1 else []

    def _select(self, prompts: Sequence[PromptAcceptance], ids: set[str] | frozenset[str]) -> list[PromptAcceptance]:
        return [prompt for prompt in prompts if prompt.sample_id in ids]

    def _find_old(self, prompts: Sequence[PromptAcceptance]) -> list[PromptAcceptance]:
        return [self.old.measured[prompt.sample_id] for prompt in prompts]


@dataclass(frozen=True)
class WalkComparison:
    """The walks of two drafts on one eval set, on the prompts of both.

    Attributes:
        paired: accepted tokens per pass, the new draft's minus the old one's; None if they cannot be compared.
        reason: why they cannot be compared.
        pair: what was compared; None if they cannot be.
    """

    paired: AcceptanceDifference | None = None
    reason: str = ""
    pair: WalkPair | None = None


def compare_reports(
    artifacts: ArtifactStore, new: Artifact, old: Artifact, eval_set: str, confidence: float | None = None
) -> WalkComparison:
    """Compare the walks of two reports on one eval set.

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
    refused = explain_other_draft_tokens(measured, before, "now", "in the report before it")
    if refused:
        return WalkComparison(reason=refused)
    resampling = measured.resampling if confidence is None else replace(measured.resampling, confidence=confidence)
    pair = WalkPair(measured, before, resampling)
    if not pair.shared:
        kind = "held-out prompt" if eval_set == HELDOUT else f"prompt of {eval_set}"
        return WalkComparison(reason=f"no {kind} has the same tokens in both reports and a pass in both")
    return WalkComparison(pair.compare(), pair=pair)


def explain_other_draft_tokens(new: MeasuredWalk, old: MeasuredWalk, by_new: str, by_old: str) -> str:
    """Return why walks with other numbers of proposed tokens do not compare; empty if these have the same number."""
    if new.draft_tokens == old.draft_tokens:
        return ""
    return (
        f"{new.draft_tokens} tokens per pass were proposed {by_new}, {old.draft_tokens} {by_old}: with more proposals the same "
        "draft has more accepted. Set evaluation.draft_tokens to compare drafts that propose different numbers by themselves"
    )


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
    paired: AcceptanceDifference | None = None
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

    Raises:
        StoreError: there is no report, or the current report or its eval data is missing or damaged.
    """
    new = artifacts.load_current(asset, target)
    old = find_previous_report(artifacts, new)
    if old is None:
        return ReplacedDraftComparison(new, None, reason=_explain_no_previous(artifacts, new))
    found = compare_reports(artifacts, new, old, HELDOUT)
    return ReplacedDraftComparison(new, old, found.paired, found.reason)


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


def read_walk(folder: Path) -> tuple[PromptAcceptance, ...]:
    """Return the walk of the trained draft in a saved report, prompt by prompt; empty if it was not measured.

    Raises:
        StoreError: missing, damaged, altered, or of another schema.
    """
    return _read_prompts(folder).get((TRAINED, WALK), ())


def read_loop(folder: Path, decoding: Decoding) -> tuple[PromptAcceptance, ...]:
    """Return rung 4 of the trained draft by a decoding, as `read_walk`."""
    return _read_prompts(folder).get((TRAINED, get_metric_name(4, decoding)), ())


def _read_prompts(folder: Path) -> PromptsByRung:
    path = require_prompts_file(folder)
    with report_file_errors(path):
        return read_prompts(path)


def find_identical_samples(left: Sequence[TokenRow], right: Sequence[TokenRow]) -> set[str]:
    """Return the ids of the samples that have the same tokens and the same loss mask in both sets."""
    rows = {row.sample_id: row for row in left}
    return {
        row.sample_id
        for row in right
        if (twin := rows.get(row.sample_id)) is not None
        and np.array_equal(row.input_ids, twin.input_ids)
        and np.array_equal(row.loss_mask, twin.loss_mask)
    }


def find_eval_answers(artifacts: ArtifactStore, report: Artifact, eval_set: str) -> Artifact:
    """Return the answers that a report was measured on, which need not be the newest ones.

    Raises:
        StoreError: they are not there any more.
    """
    identity, asset = ReportIdentity.of(report), of_eval_set(eval_set).responses
    measured = identity.heldout if eval_set == HELDOUT else identity.evals.get(eval_set)
    wanted = None if measured is None else measured.answers
    for responses in artifacts.list_all(asset, report.target):
        if responses.data_version == wanted:
            return responses
    raise StoreError(f"{report.path}: the {asset} {wanted} that it was measured on are not there any more")
