"""The leaderboard: acceptance, interval, age, best value and staleness of every draft of every target.

It reads records only, no features or weights, and imports no torch: a thousand targets take seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import DraftworksError
from draftworks.evaluation.report.summary import TRAINED, ReportSummary, RungScore
from draftworks.fleet.draft_staleness import DraftComparison
from draftworks.fleet.staleness import Subject
from draftworks.storage.artifacts import Artifact, ArtifactStore, ReadOnceStore
from draftworks.storage.identity import FileDigests, ReadOnceDigests
from draftworks.storage.names import of_eval_set, of_strategy
from draftworks.storage.records import ConversationsIdentity, EvalSetIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT, ReadOnceRegistry, Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import identify_eval_data

WALK_RUNG, SIMULATED_RUNG = 3, 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportScore:
    """The main score of one published report.

    Attributes:
        created: seconds since the epoch.
        draft: name of the draft, the digest of what it was made from; None in early records.
    """

    eval_set: str
    score: RungScore
    created: float
    draft: str | None


@dataclass(frozen=True)
class Standing:
    """Leaderboard row of one strategy of one target, or of a target whose registry entry cannot be read (strategy
    empty).

    Attributes:
        latest: the newest report; None if there is none that can be read.
        best: the report with the highest value of the same metric, among all that were ever published.
        stale_against: in words, what has changed since the newest report.
        draft_changes: in words, what has changed since the draft was trained. A new report does not change that.
        problem: why there is no `latest`, or why staleness is not known.
    """

    target: str
    strategy: str
    latest: ReportScore | None = None
    best: ReportScore | None = None
    stale_against: tuple[str, ...] = ()
    draft_changes: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def value(self) -> float | None:
        return None if self.latest is None else self.latest.score.value


@dataclass(frozen=True)
class Fleet:
    """Registry and results that the leaderboard is read from."""

    registry: Registry
    artifacts: ArtifactStore
    digests: FileDigests

    @classmethod
    def of(cls, registry: Registry) -> Fleet:
        var = registry.resolve_var_folder()
        return cls(registry, ArtifactStore(var), FileDigests(var / "digests.json"))

    def standings(self) -> list[Standing]:
        """Return every strategy of every target, the highest acceptance first, those without a value last."""
        once = replace(self, registry=ReadOnceRegistry(self.registry.root), digests=ReadOnceDigests(self.digests))
        found = [standing for name in self.registry.list_targets() for standing in once._of_target(name)]
        return sorted(found, key=lambda one: (one.value is None, -(one.value or 0), one.target, one.strategy))

    def _of_target(self, name: str) -> Iterator[Standing]:
        try:
            target = self.registry.load_target(name)
        except DraftworksError as error:
            yield Standing(name, strategy="", problem=str(error))
            return
        once = replace(self, artifacts=ReadOnceStore(self.artifacts.root, self.artifacts.digests))
        for strategy in target.strategies:
            try:
                yield once._of_strategy(target, strategy)
            except DraftworksError as error:
                yield Standing(name, strategy, problem=str(error))

    def _of_strategy(self, target: TargetSpec, strategy: str) -> Standing:
        report = self.artifacts.find(of_strategy(strategy).report, target.name)
        draft = self.artifacts.find(of_strategy(strategy).draft, target.name)
        if report is None:
            problem = "no draft yet" if draft is None else "no report of its draft yet: run the job `evaluate`"
            return Standing(target.name, strategy, problem=problem)
        latest = read_measured(report)
        earlier = [each for each in self.artifacts.list_all(report.asset, target.name) if each.path != report.path]
        best = find_best(latest, earlier)
        try:
            files = resolve_target(target, self.registry, self.digests)
            stale_against = self._stale_against(target, files, {} if draft is None else {strategy: draft})
            draft_changes = () if draft is None else self.list_draft_changes(draft, target, files)
        except DraftworksError as error:
            return Standing(target.name, strategy, latest, best, problem=str(error))
        return Standing(target.name, strategy, latest, best, stale_against, draft_changes)

    def list_draft_changes(self, draft: Artifact, target: TargetSpec, files: TargetFiles) -> tuple[str, ...]:
        """Return, in words, what has changed since a draft was trained."""
        trained_for = DraftComparison(draft, target, files, self.registry, self.artifacts, self.digests)
        return tuple(map(str, trained_for.changes()))

    def _stale_against(self, target: TargetSpec, files: TargetFiles, drafts: dict[str, Artifact]) -> tuple[str, ...]:
        """Return what has changed since the report, for the set `heldout` only, on which the shown score was
        measured."""
        responses = {HELDOUT: self.artifacts.find(of_eval_set(HELDOUT).responses, target.name)}
        subject = Subject(files, drafts, responses, self._read_source(target, files))
        return tuple(subject.changes(self.artifacts))

    def _read_source(
        self, target: TargetSpec, files: TargetFiles
    ) -> dict[str, ConversationsIdentity | EvalSetIdentity]:
        """Return what `heldout` would be made from now; nothing if it was never made, or its data cannot be read, which is
        among the changes since the training."""
        if self.artifacts.find(of_eval_set(HELDOUT).conversations, target.name) is None:
            return {}
        try:
            return {HELDOUT: identify_eval_data(HELDOUT, target, files.vocab_size, self.registry, self.digests)}
        except DraftworksError:
            return {}


def read_measured(report: Artifact) -> ReportScore:
    """Return the main score of a report: the walk (rung 3), or simulated_acc_len if there is no walk.

    Raises:
        StoreError: the report is damaged, or of another schema.
    """
    summary = ReportSummary.load(report.path / HELDOUT)
    walks = [score for score in summary.select_scores(TRAINED, WALK_RUNG) if score.value is not None]
    score = (walks or summary.select_scores(TRAINED, SIMULATED_RUNG))[0]
    return ReportScore(summary.eval_set, score, summary.created.timestamp(), ReportIdentity.of(report).draft_identity)


def find_best(latest: ReportScore, reports: Sequence[Artifact]) -> ReportScore:
    """Return the highest score of the same metric; of equal scores the earliest."""
    comparable = [found for found in map(_readable, reports) if found and found.score.metric == latest.score.metric]
    return max([latest, *comparable], key=lambda found: (found.score.value, -found.created))


def _readable(report: Artifact) -> ReportScore | None:
    """Return the main score of a report; None if it is damaged or of another schema."""
    try:
        return read_measured(report)
    except DraftworksError as error:
        log.info("not among the best: %s", error)
        return None
