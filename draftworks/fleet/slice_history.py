"""Slices of a draft over time: its reports prompt by prompt, the report at its promotion, and whether weights have helped.

Reads records and tables only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftworks.data.slices import WEIGHTS_FILE, SlicePlan, read_plan, select_slice_columns
from draftworks.errors import StoreError
from draftworks.evaluation.ladder.statistics import select_measured
from draftworks.evaluation.report.slice_changes import MeasuredPrompts, SliceChange, compare_slices
from draftworks.evaluation.report.walk_pairs import MeasuredWalk
from draftworks.service.register import ServiceRegister
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.identity import digest
from draftworks.storage.names import CONVERSATIONS, RESPONSES, TOKENIZED_TRAIN, of_strategy
from draftworks.storage.records import DraftIdentity, ReportIdentity
from draftworks.targets.registry import HELDOUT


@dataclass(frozen=True)
class WeightedSlices:
    """Whether the weights of a draft's training data have helped: its slices against those that the plan was made from.

    Attributes:
        had_effect: False if all conversations were taken, so that the weights chose none.
    """

    plan: SlicePlan
    changes: tuple[SliceChange, ...]
    had_effect: bool = True


@dataclass(frozen=True)
class SliceHistory:
    """The reports of one strategy of a target."""

    artifacts: ArtifactStore
    target: str
    strategy: str

    def find_report(self, name: str) -> Artifact | None:
        """Return a report by its name; None if it was removed."""
        return next((one for one in self._list_reports() if one.path.name == name), None)

    def find_newest(self, draft: str | None = None) -> Artifact | None:
        """Return the newest report of a draft, by the draft's digest, or of any draft."""
        found = self._list_reports()
        return next((one for one in found if draft in (None, ReportIdentity.of(one).draft_identity)), None)

    def find_draft_in_service(self) -> str:
        """Return the digest of the draft in service. Raises StoreError if there is none."""
        return self._register.require().draft.digest

    def require_reference(self, draft: str) -> Artifact:
        """Return the report with which a draft was promoted, or else that of the draft in service.

        Raises:
            StoreError: no draft is in service, or the report was removed.
        """
        now = self._register.require()
        earlier = [one.draft for one in self._register.read_history() if one.draft.digest == draft]
        name = (earlier[0] if earlier else now.draft).report
        found = self.find_report(name)
        if found is None:
            raise StoreError(
                f"target {self.target}, {self.strategy}: the report {name} of the promotion is not there any more: slices "
                "have nothing to be compared with. Evaluate and promote a draft again"
            )
        return found

    def find_weighted(self, report: Artifact) -> WeightedSlices | None:
        """Compare a draft that was trained with weights with the report that they were made from.

        Returns:
            None if it was trained without weights, with a plan of none, or with those of another strategy.

        Raises:
            StoreError: that report, or its eval data, is gone.
            DataError: the reports do not compare.
        """
        wanted = ReportIdentity.of(report).draft_identity
        drafts = self.artifacts.list_all(of_strategy(self.strategy).draft, self.target)
        draft = next((one for one in drafts if one.path.name == wanted), None)
        prepared = None if draft is None else self._find_weighted_data(draft)
        plan = None if prepared is None else read_plan(prepared.path / WEIGHTS_FILE)
        if plan is None or not plan.weights or (plan.target, plan.strategy) != (self.target, self.strategy):
            return None
        assert prepared is not None, "the plan is from there"
        before = self.find_report(plan.report)
        if before is None:
            raise StoreError(f"the report {plan.report} that the weights were made from is not there any more")
        pair = [self.read_measured(one, plan.eval_set) for one in (report, before)]
        slices = [(one.column, one.value) for one in plan.weights]
        changes = compare_slices(pair[0], pair[1], only=slices)
        return WeightedSlices(plan, changes, prepared.summary.get("weights_have_effect") is not False)

    def read_measured(self, report: Artifact, eval_set: str) -> MeasuredPrompts:
        """Return the walk of a report, prompt by prompt, with the slice columns of its eval data.

        Raises:
            StoreError: the report or its eval data is missing or damaged.
        """
        found = MeasuredWalk.of(self.artifacts, report, eval_set)
        assert found.tokens is not None, "of a report in a store"
        walk = select_measured(found.prompts)
        rows = {row.sample_id: row for row in found.tokens}
        unknown = sorted(walk.keys() - rows.keys())
        if unknown:
            raise StoreError(f"{report.path}: prompt {unknown[0]} is not in the eval data that the report names")
        return MeasuredPrompts(
            report.path.name,
            ReportIdentity.of(report).draft,
            found.draft_tokens,
            walk,
            {name: digest([rows[name].token_digest, rows[name].loss_mask.tobytes().hex()]) for name in walk},
            {name: select_slice_columns(rows[name].columns) for name in walk},
            found.resampling,
        )

    def list_eval_sets(self, report: Artifact) -> list[str]:
        """Return the eval sets of a report, `heldout` first."""
        return [HELDOUT, *sorted(ReportIdentity.of(report).evals)]

    @property
    def _register(self) -> ServiceRegister:
        return ServiceRegister(self.artifacts.root, self.target, self.strategy)

    def _list_reports(self) -> list[Artifact]:
        return self.artifacts.list_all(of_strategy(self.strategy).report, self.target)

    def _find_weighted_data(self, draft: Artifact) -> Artifact | None:
        """Return the conversations from which a draft's training tokens were made, if they were chosen by weights."""
        versions: set[str | None] = {DraftIdentity.of(draft).tokens}
        for asset, key in ((TOKENIZED_TRAIN, "responses"), (RESPONSES, "conversations")):
            made = self.artifacts.list_all(asset, self.target)
            versions = {one.identity.get(key) for one in made if one.data_version in versions}
        for prepared in self.artifacts.list_all(CONVERSATIONS, self.target):
            if prepared.data_version in versions and (prepared.path / WEIGHTS_FILE).is_file():
                return prepared
        return None


def summarize_weighted(found: WeightedSlices) -> str:
    """Return in a sentence or two on how many of the weighted slices the draft accepts more than before."""
    verdicts: Mapping[str, str] = {"rose": "helped", "fell": "fell further", "no clear change": "no clear change"}
    counts = {word: sum(one.verdict == name for one in found.changes) for name, word in verdicts.items()}
    unknown = sum(one.verdict == "too few prompts" for one in found.changes)
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    said += f"{', ' if said and unknown else ''}{unknown} with too few prompts" if unknown else ""
    said = f"Of {len(found.changes)} slice{'s' * (len(found.changes) != 1)} that this draft's data was weighted towards: {said or 'none'}."
    if found.had_effect:
        return said
    return f"{said} The weights had no part in it: all conversations were taken, see data.max_conversations."
