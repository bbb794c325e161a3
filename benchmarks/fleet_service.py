"""Reports and the draft in service of a target of a made-up fleet: the product's statistics, rule of promotion and record.

What stands between reports and the rule in `draftworks.service.promotion` needs the files of a real report, and is done
here in memory; the records of drafts in service are real files, replaced and read by the product's register.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fleet_facts import describe_promotion
from fleet_truth import Draft, measure
from fleet_world import ToyTarget

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance, micro_mean
from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Resampling, compare_paired
from draftworks.service.register import EvalFigures, InService, ServedDraft, ServiceRegister
from draftworks.service.rule import (
    Compared,
    Margins,
    Verdict,
    describe_figures,
    judge_eval_set,
    rank_earlier,
    was_measured,
)

STRATEGY = "eagle3"
YEAR = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Report:
    """The walks of a draft on every eval set of its target, as they were.

    Attributes:
        name: its identity.
        data: identity of the prompts and answers of each eval set.
        truths: the true value of the draft on each.
    """

    name: str
    draft: str
    target_digest: str
    data: dict[str, str]
    walks: dict[str, tuple[PromptAcceptance, ...]]
    truths: dict[str, float]


@dataclass(frozen=True)
class Judged:
    """What the rule says of a draft.

    Attributes:
        facts: of each eval set, for an oracle; see `fleet_facts`.
    """

    draft: Draft
    figures: tuple[EvalFigures, ...]
    facts: tuple[dict[str, Any], ...]

    @property
    def accepted(self) -> bool:
        return all(Verdict(each.verdict).accepts for each in self.figures)

    def describe(self) -> str:
        return "; ".join(describe_figures(each) for each in self.figures)


@dataclass
class ToyService:
    """The drafts of a target that were measured, and those that were in service.

    Attributes:
        seed: of the measurements.
        reports: oldest first.
        history: as the register has it.
    """

    target: ToyTarget
    var: Path
    resampling: Resampling
    seed: int
    reports: list[Report] = field(default_factory=list)
    history: tuple[InService, ...] = ()
    _compared: dict[tuple[str, str, str], AcceptanceDifference] = field(default_factory=dict)

    @property
    def register(self) -> ServiceRegister:
        return ServiceRegister(self.var, self.target.name, STRATEGY)

    @property
    def in_service(self) -> InService | None:
        return self.history[-1] if self.history else None

    def evaluate(self, draft: Draft) -> Report:
        """Measure a draft on the eval data of now; what was measured already is not measured again."""
        target, data = self.target, self.data
        known = next((each for each in self.list_reports(draft.digest) if each.data == data), None)
        if known is not None:
            return known
        earlier = {
            (name, found): each.walks[name]
            for each in self.list_reports(draft.digest)
            for name, found in each.data.items()
        }
        walks = {
            name: earlier.get((name, drawn.data)) or measure(draft, target.mean_of(draft, name), drawn, self.seed)
            for name, drawn in target.evals.items()
        }
        truths = {name: target.value_of(draft, name) for name in data}
        made = Report(f"{draft.digest}r{len(self.reports)}", draft.digest, target.digest, data, walks, truths)
        self.reports.append(made)
        return made

    def list_reports(self, draft: str) -> Iterator[Report]:
        """Yield the reports of a draft, newest first."""
        return (each for each in reversed(self.reports) if each.draft == draft)

    def judge(self, draft: Draft) -> Judged:
        """Judge a draft by its newest report, which has to be about every eval set."""
        found = [self._judge_on(name, draft) for name in self.target.evals]
        return Judged(draft, tuple(figures for figures, _ in found), tuple(facts for _, facts in found))

    def promote(self, judged: Judged, hour: float, why: str) -> InService:
        """Put a draft into service that the rule accepts."""
        assert judged.accepted
        now, draft = self.in_service, judged.draft
        report = self.find_newest(draft.digest)
        assert report is not None
        made = InService(
            number=1 if now is None else now.number + 1,
            target=self.target.name,
            strategy=STRATEGY,
            action="promote",
            draft=ServedDraft(
                draft.digest,
                f"{STRATEGY}_export/{self.target.name}/{draft.digest}",
                {"sglang_eagle3": f"{draft.digest}f"},
                f"{draft.digest}e",
                f"{draft.digest}x",
                draft.target_digest,
                report.name,
            ),
            previous=None if now is None else now.draft.digest,
            rollback_to=None if now is None else now.number,
            who="year",
            when=(YEAR + timedelta(hours=hour)).isoformat(timespec="seconds"),
            why=why,
            figures=judged.figures,
        )
        self.register.replace(None if now is None else now.draft.digest, lambda _: made)
        self.history = self.register.read_history()
        assert self.history[-1] == made
        return made

    @property
    def data(self) -> dict[str, str]:
        """The identity of the prompts and answers of each eval set now."""
        return {name: drawn.data for name, drawn in self.target.evals.items()}

    def list_earlier(self) -> list[Draft]:
        """Return the drafts that were in service for the weights of now."""
        digests = dict.fromkeys(
            each.draft.digest for each in self.history if each.draft.target_digest == self.target.digest
        )
        return [self.target.find_draft(each) for each in digests]

    def compare(self, new: Report, old: Report, name: str) -> AcceptanceDifference | None:
        """Compare two drafts on the prompts of both: all or none, as prompts are drawn all at once."""
        if name not in new.data or new.data[name] != old.data.get(name):
            return None
        key = (new.draft, old.draft, new.data[name])
        if key not in self._compared:
            self._compared[key] = compare_paired(new.walks[name], old.walks[name], self.resampling)
        return self._compared[key]

    def find_newest(self, draft: str) -> Report | None:
        return next(self.list_reports(draft), None)

    def _judge_on(self, name: str, draft: Draft) -> tuple[EvalFigures, dict[str, Any]]:
        digest, settings = self.target.digest, self.target.service
        report = self.find_newest(draft.digest)
        assert report is not None, f"draft {draft.digest} is not measured"
        ranked = rank_earlier(self.history, digest, name)
        paired = {each.digest: self._compare_any(report, each.digest, name) for each in ranked}
        compared = {
            earlier: Compared(reason=f"draft {earlier} has no prompt of {name} in common")
            if found is None
            else self._describe(found, report, earlier, name)
            for earlier, found in paired.items()
        }
        margins = Margins(settings.select_margin(name), settings.least_prompts)
        figures = judge_eval_set(name, ranked, compared, margins, was_measured(self.history, digest, name))
        facts = describe_promotion(
            name, margins.margin, margins.least_prompts, self.history, digest, paired, [draft.digest]
        )
        return figures, facts

    def _compare_any(self, report: Report, earlier: str, name: str) -> AcceptanceDifference | None:
        for old in self.list_reports(earlier):
            found = self.compare(report, old, name)
            if found is not None:
                return found
        return None

    def _describe(self, found: AcceptanceDifference, report: Report, earlier: str, name: str) -> Compared:
        old = next(each for each in self.list_reports(earlier) if each.data.get(name) == report.data[name])
        means = micro_mean(report.walks[name]), micro_mean(old.walks[name])
        return Compared(found, means[0], means[1], same_weights=earlier == report.draft)
