"""The rule of decisions: the loss of the draft in service and its 95% interval, against two margins. Pure, torch-free.

The loss on an eval set is the accepted tokens per pass of the reference minus those of the draft in service now; see
`draftworks.decision.figures` for the reference. docs/how-to/decisions.md states the rule to the letter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftworks.decision.record import UNPAIRED, Choice, EvalLoss, Margins, Reference
from draftworks.evaluation.ladder.statistics import Interval
from draftworks.service.rule import MAX_PROMPTS, NO_WIDTH
from draftworks.storage.words import format_count

URGENCY = (Choice.RETRAIN, Choice.TUNE, Choice.UNDECIDED, Choice.KEEP)
"""The choice of a target is the first of these that any eval set has."""


@dataclass(frozen=True)
class Loss:
    """A loss with its 95% interval.

    Attributes:
        fixed_below, fixed_above: of the distances from `value` to `low` and to `high`, the parts that no further prompt
            makes smaller: the uncertainty of a former figure.
    """

    value: float
    low: float
    high: float
    fixed_below: float = 0.0
    fixed_above: float = 0.0


@dataclass(frozen=True)
class LossEvidence:
    """Figures of the loss on one eval set.

    Attributes:
        reference_draft: digest of the draft that the loss is counted from.
        value, reference_value: accepted tokens per pass of the draft in service now, and of the reference.
        loss: None if there is nothing to compare with.
        prompts: shared prompts; with a former figure those of the new measurement, and `reference_prompts` its own.
        after_tune: digest of a tune that was made for what has changed since; None: none was made.
        reason: why there is nothing to compare with; or what lost it, where that is known.
        is_new: no draft was measured on the eval set when the reference was put into service: nothing can be lost on it.
        same_weights: whether both measurements are of one draft, on the same prompts: it cannot differ from itself.
    """

    eval_set: str
    reference: Reference
    reference_draft: str | None = None
    value: float | None = None
    reference_value: float | None = None
    loss: Loss | None = None
    prompts: int = 0
    reference_prompts: int = 0
    after_tune: str | None = None
    reason: str = ""
    is_new: bool = False
    same_weights: bool = False

    @property
    def lacks_width(self) -> bool:
        """Whether the interval of the loss says nothing: the loss is the same on every prompt, and by no necessity."""
        return self.loss is not None and self.loss.low == self.loss.high and not self.same_weights


@dataclass(frozen=True)
class Verdict:
    """The choice for a target, with the loss on each eval set.

    Attributes:
        after_tune: digest of the tune that did not help, where the choice is `retrain`.
    """

    choice: Choice
    figures: tuple[EvalLoss, ...]
    after_tune: str | None


def decide(evidence: Sequence[LossEvidence], margins: Margins) -> Verdict:
    """Return the choice that the losses on all eval sets call for: the most urgent one of any set."""
    figures = tuple(judge_eval_set(each, margins) for each in evidence)
    choice = next((each for each in URGENCY if any(one.choice is each for one in figures)), Choice.UNDECIDED)
    tunes = (
        each.after_tune
        for each, found in zip(evidence, figures, strict=True)
        if found.choice is Choice.RETRAIN and each.after_tune is not None
    )
    return Verdict(choice, figures, next(tunes, None))


def judge_eval_set(evidence: LossEvidence, margins: Margins) -> EvalLoss:
    """Return the choice for the loss on one eval set."""
    loss = evidence.loss
    if loss is None:
        choice = Choice.KEEP if evidence.is_new else Choice.UNDECIDED
        return EvalLoss(
            evidence.eval_set,
            choice,
            Reference.NONE,
            evidence.reference_draft,
            evidence.value,
            prompts=evidence.prompts,
            reason=evidence.reason,
        )
    choice = _choose(evidence, loss, margins)
    return EvalLoss(
        evidence.eval_set,
        choice,
        evidence.reference,
        evidence.reference_draft,
        evidence.value,
        evidence.reference_value,
        loss.value,
        loss.low,
        loss.high,
        evidence.prompts,
        evidence.reference_prompts,
        count_prompts_to_decide(evidence, loss, margins) if choice is Choice.UNDECIDED else None,
        "; ".join(filter(None, (evidence.reason, _explain(evidence, loss, choice, margins)))),
    )


def count_prompts_to_decide(evidence: LossEvidence, loss: Loss, margins: Margins) -> int | None:
    """Return about how many prompts would decide an eval set, if the loss stays as it is; None if more would not.

    The part of the interval that is not fixed goes with one over the root of the number of prompts.
    """
    if _has_few_reference_prompts(evidence, margins) or evidence.lacks_width:
        return None
    distance = abs(loss.value - margins.tune)
    if loss.value == margins.tune:
        return None
    is_above = loss.value > margins.tune
    width = loss.value - loss.low if is_above else loss.high - loss.value
    fixed = loss.fixed_below if is_above else loss.fixed_above
    room = distance * distance - fixed * fixed
    if room <= 0:
        return None
    variable = max(width * width - fixed * fixed, 0.0) if width > 0 else 0.0
    wanted = evidence.prompts * variable / room
    if not wanted <= MAX_PROMPTS:
        return None
    found = math.floor(wanted) + 1 if is_above else math.ceil(wanted)
    return max(found, margins.least_prompts, evidence.prompts + 1)


def subtract_figures(former: float, former_interval: Interval, now: float, now_interval: Interval) -> Loss:
    """Return former minus now for two independent measurements, with the interval of the difference.

    The distances of each interval to its own value are added as roots of sums of squares: Zou & Donner 2008 (MOVER),
    which keeps intervals that are not symmetric.
    """
    loss = former - now
    below, above = max(former - former_interval.low, 0.0), max(former_interval.high - former, 0.0)
    low = loss - math.hypot(below, max(now_interval.high - now, 0.0))
    high = loss + math.hypot(above, max(now - now_interval.low, 0.0))
    return Loss(loss, low, high, below, above)


def _choose(evidence: LossEvidence, loss: Loss, margins: Margins) -> Choice:
    if evidence.prompts < margins.least_prompts or _has_few_reference_prompts(evidence, margins):
        return Choice.UNDECIDED
    if evidence.lacks_width:
        return Choice.UNDECIDED
    if loss.high <= margins.tune:
        return Choice.KEEP
    if loss.low > margins.retrain:
        return Choice.RETRAIN
    if loss.low > margins.tune:
        return Choice.TUNE if evidence.after_tune is None else Choice.RETRAIN
    return Choice.UNDECIDED


def _has_few_reference_prompts(evidence: LossEvidence, margins: Margins) -> bool:
    return evidence.reference in UNPAIRED and evidence.reference_prompts < margins.least_prompts


def _explain(evidence: LossEvidence, loss: Loss, choice: Choice, margins: Margins) -> str:
    """Return the reason in words, where the numbers do not show it."""
    if choice is Choice.RETRAIN and loss.low <= margins.retrain:
        return f"the tune {evidence.after_tune} did not help"
    if choice is not Choice.UNDECIDED:
        return ""
    if _has_few_reference_prompts(evidence, margins):
        return (
            f"the former figure is of {format_count(evidence.reference_prompts, 'prompt')}, at least "
            f"{margins.least_prompts} are needed, and it cannot be measured again"
        )
    found = count_prompts_to_decide(evidence, loss, margins)
    missing = margins.least_prompts - evidence.prompts
    few = (
        f"{format_count(evidence.prompts, 'prompt')}, at least {margins.least_prompts} are needed, {missing} more; "
        if missing > 0
        else ""
    )
    if evidence.lacks_width:
        return f"{few}{NO_WIDTH}"
    if found is None:
        return f"{few}more prompts would not decide"
    return f"{few}about {format_count(found, 'prompt')} would decide, if the loss stays"
