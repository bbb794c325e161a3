"""What a target of a made-up fleet has lost, as docs/how-to/decisions.md says, for the product's rule of decisions.

`draftworks.decision.figures` reads the files of real reports; this does the same in memory. The statistics, the rule and
the record are the product's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fleet_facts import describe_decision, describe_loss, describe_measurement
from fleet_service import STRATEGY, YEAR, Report, ToyService
from fleet_truth import Draft

from draftworks.decision.deciding import explain
from draftworks.decision.record import Choice, Costs, Decision, EvalLoss, Margins, Reference
from draftworks.decision.rule import Loss, LossEvidence, decide, subtract_figures
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean
from draftworks.evaluation.ladder.statistics import Interval
from draftworks.storage.identity import digest


@dataclass(frozen=True)
class Found:
    """The loss on one eval set, with its facts for an oracle, and what was truly lost; None: nothing to compare with."""

    evidence: LossEvidence
    facts: dict[str, Any]
    truly: float | None


@dataclass(frozen=True)
class Decided:
    """A decision, with its facts for an oracle, and what was truly lost on each eval set."""

    decision: Decision
    facts: dict[str, Any]
    truly: tuple[float | None, ...]

    @property
    def is_wrong(self) -> bool:
        """Whether the choice is another one than the true losses call for, on any eval set."""
        pairs = [(each, true) for each, true in zip(self.decision.figures, self.truly, strict=True) if true is not None]
        return any(_is_wrong(each, true, self.decision.margins) for each, true in pairs)


def decide_target(service: ToyService, hour: float, costs: Costs) -> Decided | None:
    """Return the decision about the draft in service; None if there is none, or it is not measured on what is there."""
    record = service.in_service
    now = None if record is None else service.find_newest(record.draft.digest)
    if record is None or now is None or (now.data, now.target_digest) != (service.data, service.target.digest):
        return None
    found = [_find_loss(service, now, name) for name in service.target.evals]
    settings = service.target.decision
    margins = Margins(settings.tune_margin, settings.retrain_margin, settings.least_prompts)
    verdict = decide([each.evidence for each in found], margins)
    sets = [_identify(service, now, each.evidence) for each in found]
    decision = Decision(
        target=service.target.name,
        strategy=STRATEGY,
        choice=verdict.choice,
        draft=record.draft.digest,
        target_digest=service.target.digest,
        subject=digest([service.target.digest, STRATEGY, record.draft.digest, sets, list(vars(margins).values())]),
        figures=verdict.figures,
        reasons=explain(verdict),
        margins=margins,
        costs=costs,
        after_tune=verdict.after_tune,
        when=(YEAR + timedelta(hours=hour)).isoformat(timespec="seconds"),
    )
    facts = describe_decision(margins.tune, margins.retrain, margins.least_prompts, [each.facts for each in found])
    assert decision.choice in Choice
    return Decided(decision, facts, tuple(each.truly for each in found))


def _is_wrong(found: EvalLoss, true: float, margins: Margins) -> bool:
    assert found.low is not None
    if found.choice is Choice.KEEP:
        return true > margins.tune
    if found.choice is Choice.RETRAIN and found.low > margins.retrain:
        return true <= margins.retrain
    return found.choice in (Choice.TUNE, Choice.RETRAIN) and true <= margins.tune


def _find_loss(service: ToyService, now: Report, name: str) -> Found:
    chosen = service.target.find_draft(now.draft)
    reference = _choose_reference(service, chosen, now, name)
    tune = chosen.digest if reference.digest != chosen.digest else _find_refused_tune(service, chosen, now, name)
    tuned = tune is not None
    before = _find_first_report(service, reference)
    common = {"reference_draft": reference.digest, "after_tune": tune}
    for kind, old in _list_paired(service, reference, before, now, name):
        paired = service.compare(now, old, name)
        if paired is None:
            continue
        evidence = LossEvidence(
            name,
            kind,
            value=micro_mean(now.walks[name]),
            reference_value=micro_mean(old.walks[name]),
            loss=Loss(-paired.difference, -paired.interval.high, -paired.interval.low),
            prompts=paired.prompts,
            reference_prompts=paired.prompts,
            same_weights=old.draft == now.draft,
            **common,
        )
        facts = describe_loss(name, kind, paired=paired, tuned=tuned, same=old.draft == now.draft)
        return Found(evidence, facts, old.truths[name] - now.truths[name])
    assert before is not None
    if name not in before.data:
        reason = f"nothing was measured on it when draft {reference.digest} was put into service"
        evidence = LossEvidence(name, Reference.NONE, reason=reason, is_new=True, **common)
        return Found(evidence, describe_loss(name, Reference.NONE, is_new=True, tuned=tuned), None)
    former = describe_measurement(before.walks[name], service.resampling)
    present = describe_measurement(now.walks[name], service.resampling)
    loss = subtract_figures(former["value"], _interval(former), present["value"], _interval(present))
    evidence = LossEvidence(
        name,
        Reference.FORMER_FIGURE,
        value=present["value"],
        reference_value=former["value"],
        loss=loss,
        prompts=present["prompts"],
        reference_prompts=former["prompts"],
        **common,
    )
    facts = describe_loss(name, Reference.FORMER_FIGURE, former=former, now=present, tuned=tuned)
    return Found(evidence, facts, before.truths[name] - now.truths[name])


def _list_paired(
    service: ToyService, reference: Draft, before: Report | None, now: Report, name: str
) -> Iterator[tuple[Reference, Report]]:
    """Yield the reports of the reference draft that the present one is paired with, the first that can be had first."""
    if before is not None and before.data.get(name) == now.data[name]:
        yield Reference.SAME_PROMPTS, before
    elif reference.digest != now.draft and reference.target_digest == service.target.digest:
        for old in service.list_reports(reference.digest):
            yield Reference.BOTH_DRAFTS, old


def _choose_reference(service: ToyService, chosen: Draft, now: Report, name: str) -> Draft:
    """Return the draft that the loss is counted from: from the one in service back through tunes for what is there now."""
    while True:
        origin = _find_origin(service, chosen)
        report = _find_first_report(service, chosen)
        is_for_today = (
            chosen.target_digest == service.target.digest
            and report is not None
            and report.data.get(name) == now.data[name]
        )
        if origin is None or not is_for_today:
            return chosen
        chosen = origin


def _find_origin(service: ToyService, draft: Draft) -> Draft | None:
    numbers = [each.number for each in service.history if each.draft.digest == draft.digest]
    before = [each for each in service.history if each.number < numbers[0] and each.draft.digest == draft.start_from]
    return service.target.find_draft(before[-1].draft.digest) if before else None


def _find_refused_tune(service: ToyService, draft: Draft, now: Report, name: str) -> str | None:
    were_in_service = {each.draft.digest for each in service.history}
    for tune in reversed(service.target.drafts):
        if tune.start_from != draft.digest or tune.target_digest != service.target.digest:
            continue
        report = service.find_newest(tune.digest)
        if report is None or report.data.get(name) != now.data[name]:
            continue
        if tune.digest in were_in_service or not service.judge(tune).accepted:
            return tune.digest
    return None


def _find_first_report(service: ToyService, draft: Draft) -> Report | None:
    record = next(each for each in service.history if each.draft.digest == draft.digest)
    return next((each for each in service.reports if each.name == record.draft.report), None)


def _identify(service: ToyService, now: Report, found: LossEvidence) -> list[Any]:
    assert found.reference_draft is not None
    before = _find_first_report(service, service.target.find_draft(found.reference_draft))
    report = None if before is None else before.name
    data = now.data[found.eval_set]
    return [found.eval_set, found.reference_draft, report, found.reference, found.after_tune, data]


def _interval(found: dict[str, Any]) -> Interval:
    return Interval(found["low"], found["high"], 0.95)
