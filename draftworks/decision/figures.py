"""The loss of the draft in service on each eval set, from reports, and the draft that it is counted from. Torch-free.

The loss is counted from the *reference draft*: the draft in service itself, or, if that is a tune for what has changed,
the draft that it was tuned from. What it is compared with is the first that can be had of

1. the report with which the reference draft was put into service, if its eval data is that of today: the same prompts;
2. where the eval data has changed and the target has not, a report of the reference draft on the data of today: both
   drafts on the new set;
3. the figure of the report with which the reference draft was put into service, which is of other prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from draftworks.decision.record import Costs, Reference
from draftworks.decision.request_loss import find_request_loss
from draftworks.decision.rule import Loss, LossEvidence, subtract_figures
from draftworks.errors import DraftworksError, StoreError
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import bootstrap_interval
from draftworks.evaluation.report.comparison import MeasuredWalk, compare_reports
from draftworks.evaluation.report.summary import REPORT, read_report, report_file_errors
from draftworks.fleet.staleness import is_made_from, is_measured_on
from draftworks.service.candidate import RefusedError
from draftworks.service.promotion import Service
from draftworks.service.register import InService, ServedDraft
from draftworks.service.rule import CONFIDENCE
from draftworks.storage.artifacts import Artifact
from draftworks.storage.identity import digest
from draftworks.storage.names import of_eval_set, of_strategy
from draftworks.storage.records import (
    ConversationsIdentity,
    DraftIdentity,
    EvalData,
    EvalFeaturesIdentity,
    EvalSetIdentity,
    ReportIdentity,
)
from draftworks.targets.registry import HELDOUT
from draftworks.targets.training_data import identify_eval_data


@dataclass(frozen=True)
class Lineage:
    """The drafts of a target and strategy.

    Attributes:
        drafts: all that are there, newest first.
        history: every record that was in service, oldest first.
    """

    drafts: Sequence[Artifact]
    history: Sequence[InService]

    @cached_property
    def first_records(self) -> dict[str, InService]:
        """The record with which each draft was first put into service, by its digest."""
        found: dict[str, InService] = {}
        for record in self.history:
            found.setdefault(record.draft.digest, record)
        return found

    def find_origin(self, draft: ServedDraft) -> ServedDraft | None:
        """Return the draft of a former record that a draft in service was tuned from; None if it was not tuned."""
        made = self._find(draft.digest)
        start = None if made is None else DraftIdentity.of(made).start_from
        if start is None:
            return None
        before = self.first_records[draft.digest].number
        earlier = [
            record.draft
            for record in self.history
            if record.number < before and record.draft.weights == start and record.draft.digest != draft.digest
        ]
        return earlier[-1] if earlier else None

    def list_tunes(self, draft: ServedDraft, target_digest: str) -> list[Artifact]:
        """Return the drafts that were tuned from a draft for these weights of the target, newest first."""
        return [
            each
            for each in self.drafts
            if each.path.name != draft.digest
            and DraftIdentity.of(each).start_from == draft.weights
            and DraftIdentity.of(each).target == target_digest
        ]

    def read_costs(self) -> Costs:
        """Return the GPU-hours of the newest tune and of the newest training from the start."""
        tunes = [each for each in self.drafts if DraftIdentity.of(each).start_from is not None]
        fresh = [each for each in self.drafts if DraftIdentity.of(each).start_from is None]
        return Costs(_read_newest_cost(tunes), _read_newest_cost(fresh))

    def _find(self, digest: str) -> Artifact | None:
        return next((each for each in self.drafts if each.path.name == digest), None)


def read_gpu_hours(draft: Artifact) -> float | None:
    """Return the GPU-hours of a training: its seconds times its ranks; None if nothing was trained or recorded."""
    try:
        seconds, ranks = float(draft.summary["seconds"]), int(draft.summary["world_size"])
    except (KeyError, TypeError, ValueError):
        return None
    return seconds * ranks / 3600 if 0 < seconds < float("inf") and ranks > 0 else None


def _read_newest_cost(drafts: Sequence[Artifact]) -> float | None:
    return next((hours for each in drafts if (hours := read_gpu_hours(each)) is not None), None)


class NotMeasuredError(DraftworksError):
    """The draft in service is not measured on the present data and weights. Nothing is decided."""


@dataclass(frozen=True)
class Evidence:
    """Figures and costs that a decision about the draft in service rests on.

    Attributes:
        subject: digest of all facts that the losses come from.
    """

    draft: ServedDraft
    losses: tuple[LossEvidence, ...]
    subject: str


@dataclass(frozen=True)
class ServedFigures:
    """The reports of the draft in service of a target, and of those before it.

    Attributes:
        lineage: the drafts of the target; at least one was put into service.
    """

    service: Service
    lineage: Lineage

    @classmethod
    def of(cls, service: Service) -> ServedFigures:
        """Read the records of a target and strategy.

        Raises:
            StoreError: no draft is in service, or a record is damaged.
        """
        service.register.require()
        drafts = service.artifacts.list_all(of_strategy(service.strategy).draft, service.target.name)
        return cls(service, Lineage(drafts, service.register.read_history()))

    @property
    def draft(self) -> ServedDraft:
        return self.lineage.history[-1].draft

    def gather(self) -> Evidence:
        """Return the loss on each eval set of the target, `heldout` first, and then by logged requests, where that is asked
        for.

        Raises:
            NotMeasuredError: the draft in service has no report on the eval data and the weights of today.
            StoreError: a report is damaged.
            DataError: a log of requests cannot be read.
        """
        self._require_own_target()
        names = [HELDOUT, *self.service.target.evals]
        for name in names:
            self._require_measured(name)
        losses = tuple(self._measure_loss(name) for name in names)
        subject, requests = self._identify(losses), find_request_loss(self.service, self.draft.digest)
        if requests is None:
            return Evidence(self.draft, losses, subject)
        served = replace(requests.evidence, after_tune=self._find_refused_tune(HELDOUT))
        return Evidence(self.draft, (*losses, served), digest([subject, requests.facts]))

    @cached_property
    def reports(self) -> list[Artifact]:
        """All reports of the target and strategy, newest first."""
        return self.service.artifacts.list_all(of_strategy(self.service.strategy).report, self.service.target.name)

    @cached_property
    def now(self) -> Artifact:
        """The newest report of the draft in service."""
        found = self._find_report_of(self.draft.digest)
        if found is None:
            raise NotMeasuredError(f"{self._where}: expected a report of it, found none. {self._measure_again}")
        return found

    @property
    def _where(self) -> str:
        return f"target {self.service.target.name}, {self.service.strategy}: draft {self.draft.digest} in service"

    @property
    def _measure_again(self) -> str:
        return f"Run it: draftworks run evaluate --target {self.service.target.name}"

    def _require_own_target(self) -> None:
        made = next((each for each in self.lineage.drafts if each.path.name == self.draft.digest), None)
        trained_for = None if made is None else DraftIdentity.of(made).target
        if made is not None and trained_for != self.draft.target_digest:
            raise StoreError(
                f"{self._where}: its record says that it was trained for the weights {self.draft.target_digest}, the draft "
                f"itself for {trained_for}: one of them is damaged. Put a draft into service again"
            )

    def _require_measured(self, name: str) -> None:
        """Raise NotMeasuredError unless the newest report is about this eval set, its data and the weights as they are
        now."""
        artifacts, target = self.service.artifacts, self.service.target.name
        assets = of_eval_set(name)
        prepared = artifacts.find(assets.conversations, target)
        if prepared is not None and not is_made_from(prepared, self._identify_data(name)):
            raise NotMeasuredError(
                f"{self._where}: the data of eval set {name}, or settings of it, have changed since its conversations were "
                f"made. {self._measure_again}"
            )
        responses, features = artifacts.find(assets.responses, target), artifacts.find(assets.features, target)
        captured = None if features is None else EvalFeaturesIdentity.of(features).target
        if captured != self.service.files.digest:
            raise NotMeasuredError(
                f"{self._where}: the features of eval set {name} are of the weights {captured}, the target's are "
                f"{self.service.files.digest} now. Run it: draftworks run evaluate --target {target}"
            )
        if not is_measured_on(self.now, name, responses, features):
            raise NotMeasuredError(
                f"{self._where}: its newest report is not about eval set {name} as it is now. {self._measure_again}"
            )

    def _identify_data(self, name: str) -> ConversationsIdentity | EvalSetIdentity:
        service = self.service
        vocab_size, digests = service.files.vocab_size, service.artifacts.digests
        return identify_eval_data(name, service.target, vocab_size, service.registry, digests)

    def _measure_loss(self, name: str) -> LossEvidence:
        reference = self._choose_reference(name)
        tuned = None if reference.digest == self.draft.digest else self.draft.digest
        if tuned is None:
            tuned = self._find_refused_tune(name)
        found = self._compare(name, reference)
        return replace(found, reference_draft=reference.digest, after_tune=tuned)

    def _choose_reference(self, name: str) -> ServedDraft:
        """Return the draft that the loss is counted from: through tunes for what has changed, back to the first."""
        chosen = self.draft
        while True:
            origin = self.lineage.find_origin(chosen)
            report = self._find_first_report(chosen)
            is_for_today = (
                chosen.target_digest == self.service.files.digest
                and report is not None
                and _read_answers(report, name) == _read_answers(self.now, name)
            )
            if origin is None or not is_for_today:
                return chosen
            chosen = origin

    def _find_refused_tune(self, name: str) -> str | None:
        """Return the newest tune of the draft in service for what is there now that the rule of promotion refuses, or
        that was taken back."""
        for tune in self.lineage.list_tunes(self.draft, self.service.files.digest):
            report = self._find_report_of(tune.path.name)
            if report is None or _read_answers(report, name) != _read_answers(self.now, name):
                continue
            if tune.path.name in self.lineage.first_records or self._is_refused(tune.path.name):
                return tune.path.name
        return None

    def _is_refused(self, draft: str) -> bool:
        try:
            return not self.service.judge(draft).accepted
        except RefusedError:
            return False  # not measured or not exported yet

    def _compare(self, name: str, reference: ServedDraft) -> LossEvidence:
        before = self._find_first_report(reference)
        reason = f"the report with which draft {reference.digest} was put into service is not there any more"
        for kind, report in self._list_paired(name, reference, before):
            found = compare_reports(self.service.artifacts, self.now, report, name, CONFIDENCE)
            if found.paired is not None:
                paired = found.paired
                loss = Loss(0.0 - paired.difference, 0.0 - paired.interval.high, 0.0 - paired.interval.low)
                return LossEvidence(
                    name,
                    kind,
                    None,
                    paired.a,
                    paired.b,
                    loss,
                    paired.prompts,
                    reference_prompts=paired.prompts,
                    same_weights=reference.weights == self.draft.weights,
                )
            reason = found.reason
        if before is None:
            return LossEvidence(name, Reference.NONE, reason=reason)
        if _read_answers(before, name) is None:
            reason = f"nothing was measured on it when draft {reference.digest} was put into service"
            return LossEvidence(name, Reference.NONE, reason=reason, is_new=True)
        return self._compare_figures(name, before)

    def _list_paired(
        self, name: str, reference: ServedDraft, before: Artifact | None
    ) -> Iterator[tuple[Reference, Artifact]]:
        """Yield the reports of the reference draft that have prompts in common with the newest one."""
        if before is not None and _read_answers(before, name) == _read_answers(self.now, name):
            yield Reference.SAME_PROMPTS, before
        elif reference.digest != self.draft.digest and reference.target_digest == self.service.files.digest:
            artifacts, target, assets = self.service.artifacts, self.service.target.name, of_eval_set(name)
            responses, features = artifacts.find(assets.responses, target), artifacts.find(assets.features, target)
            for report in self.reports:
                of = ReportIdentity.of(report)
                if of.draft == reference.weights and is_measured_on(report, name, responses, features):
                    yield Reference.BOTH_DRAFTS, report

    def _compare_figures(self, name: str, before: Artifact) -> LossEvidence:
        """Compare the newest report with the figure of a former one on other prompts."""
        new, old = (MeasuredWalk.read(report.path / name, None) for report in (self.now, before))
        if new.draft_tokens != old.draft_tokens:
            reason = f"{new.draft_tokens} tokens per pass are proposed now, {old.draft_tokens} were when it was put into service"
            return LossEvidence(name, Reference.NONE, reason=reason)
        resampling = replace(new.resampling, confidence=CONFIDENCE)
        value, former = micro_mean(new.prompts), micro_mean(old.prompts)
        interval, former_interval = (bootstrap_interval(walk.prompts, resampling) for walk in (new, old))
        if value is None or former is None or interval is None or former_interval is None:
            return LossEvidence(name, Reference.NONE, reason="the walk of one of the reports has no pass")
        loss = subtract_figures(former, former_interval, value, interval)
        return LossEvidence(
            name,
            Reference.FORMER_FIGURE,
            None,
            value,
            former,
            loss,
            _count_measured(new.prompts),
            _count_measured(old.prompts),
        )

    def _find_first_report(self, draft: ServedDraft) -> Artifact | None:
        wanted = self.lineage.first_records[draft.digest].draft.report
        return next((each for each in self.reports if each.path.name == wanted), None)

    def _find_report_of(self, draft: str) -> Artifact | None:
        return next((each for each in self.reports if ReportIdentity.of(each).draft_identity == draft), None)

    def _identify(self, losses: Sequence[LossEvidence]) -> str:
        """Return the digest of the facts: the same drafts on the same data have the same losses."""
        sets: list[Any] = []
        for each in losses:
            reference = each.reference_draft or self.draft.digest
            before = self.lineage.first_records[reference].draft.report
            data = _read_data(self.now, each.eval_set)
            walk = _read_settings(self.now, each.eval_set)
            sets.append(
                [each.eval_set, reference, before, each.reference, each.after_tune, data and data.to_json(), walk]
            )
        return digest([self.service.files.digest, self.service.strategy, self.draft.digest, sets])


def _count_measured(prompts: Sequence[PromptAcceptance]) -> int:
    """Return the number of prompts with a pass."""
    return sum(each.passes > 0 for each in prompts)


def _read_settings(report: Artifact, name: str) -> list[Any]:
    """Return the settings of a report's figures: tokens per pass, resamples, seed."""
    values = read_report(report.path / name)
    with report_file_errors(report.path / name / REPORT):
        return [values["draft_tokens"], values["resampling"]["resamples"], values["resampling"]["seed"]]


def _read_data(report: Artifact, name: str) -> EvalData | None:
    of = ReportIdentity.of(report)
    return of.heldout if name == HELDOUT else of.evals.get(name)


def _read_answers(report: Artifact, name: str) -> str | None:
    """Return the content version of the answers that a report was measured on; None if it was not on this eval set."""
    data = _read_data(report, name)
    return None if data is None else data.answers
