"""Trainings that start now of all that decisions call for, and why the others wait: a pure function of a fleet's state.

docs/how-to/decisions.md states the order and each comparison to the letter. Time is an argument; nothing is read here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from draftworks.config.operations import BudgetSpec, DecisionSpec
from draftworks.decision.budget import HOUR_S, ROUNDING, Charge, Entry, Ledger, Outcome
from draftworks.decision.record import Answer, Answers, Choice, Decision, EvalLoss
from draftworks.storage.identity import digest
from draftworks.storage.words import format_count

ALLOWED = {
    "none": frozenset[Choice](),
    "tune": frozenset({Choice.TUNE}),
    "retrain": frozenset({Choice.TUNE, Choice.RETRAIN}),
}
"""What each value of `act` lets start without a person."""


class Action(StrEnum):
    """The action for a decision now."""

    START = "start"
    WAIT = "wait"
    ASK = "ask"
    """A person is asked: `draftworks accept`."""
    KEEP = "keep"


@dataclass(frozen=True)
class TargetState:
    """State of a target beside its decisions.

    Attributes:
        settings: section `decision` of its entry.
        ranks: processes of a training, by strategy.
        busy: in words, the run that is queued or works for it; None if there is none.
        problem: why nothing can be started, such as an entry that cannot be read.
    """

    settings: DecisionSpec
    ranks: Mapping[str, int] = field(default_factory=dict)
    busy: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class FleetState:
    """All inputs of the plan of starts.

    Attributes:
        decisions: the newest of each target and strategy.
        targets: by name; the decision of a target that is not here is left alone.
        outdated: by target and strategy, why a decision is not about what is there now.
        damaged: what is wrong with decisions that cannot be read; the others go on.
    """

    decisions: Sequence[Decision]
    targets: Mapping[str, TargetState]
    ledger: Ledger
    budget: BudgetSpec | None
    answers: Answers = Answers()
    outdated: Mapping[tuple[str, str], str] = field(default_factory=dict)
    damaged: Sequence[str] = ()


@dataclass(frozen=True)
class Step:
    """The action for one decision now, and why.

    Attributes:
        choice: what is to be done in the end: the decision's choice, or a person's.
        reason: in words.
        figures: the loss that the decision was made by, its interval and its eval set; where the step is START, also the
            GPU-hours that it is charged and those that are left.
        priority: traffic x loss.
        hours: estimate in GPU-hours; None if it is not known, or nothing is to be done.
        charge: what to add to the ledger before the run is submitted; for START alone.
    """

    target: str
    strategy: str
    action: Action
    choice: Choice
    reason: str
    figures: str = ""
    priority: float = 0.0
    hours: float | None = None
    charge: Charge | None = None


def plan_actions(state: FleetState, now: float) -> list[Step]:
    """Return one step for each decision, the most urgent first: by traffic x loss, then by target and strategy.

    Args:
        now: seconds since the epoch.
    """
    attempts: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
    working: dict[str, Entry] = {}
    for entry in state.ledger.entries.values():
        attempts[entry.charge.target, entry.charge.strategy].append(entry)
        if entry.is_open:
            working[entry.charge.target] = entry
    wanted = [
        _judge(decision, state, attempts[decision.target, decision.strategy], working.get(decision.target), now)
        for decision in state.decisions
        if decision.target in state.targets
    ]
    wanted.sort(key=lambda step: (-step.priority, step.target, step.strategy))
    return _spend(wanted, state, now)


def measure_priority(decision: Decision, traffic: float) -> float:
    """Return traffic x loss: the largest loss of the eval sets that call for the decision's choice, at least 0."""
    found = _find_decisive(decision)
    return 0.0 if found is None or found.loss is None else traffic * max(0.0, found.loss)


def describe_decisive_loss(decision: Decision) -> str:
    """Return the loss that the priority is calculated from, with its interval and eval set."""
    found = _find_decisive(decision)
    if found is None or found.loss is None or found.low is None or found.high is None:
        return "no loss is known"
    return (
        f"lost {found.loss:+.3f} accepted tokens per pass ({found.low:+.3f} to {found.high:+.3f}) on {found.eval_set}"
    )


def _find_decisive(decision: Decision) -> EvalLoss | None:
    """Return the eval set with the largest loss of those that call for the choice, or of all if none of them has one."""
    known = [one for one in decision.figures if one.loss is not None]
    deciding = [one for one in known if one.choice is decision.choice]
    return max(deciding or known, key=lambda one: one.loss or 0.0, default=None)


def estimate_hours(decision: Decision, choice: Choice, attempts: Sequence[Entry], budget: BudgetSpec) -> float | None:
    """Return the GPU-hours to charge for a training; None if they are not known.

    The larger of the decision's cost and what the newest one of this kind took that succeeded here, whose run prepared
    data as well. A tune without either counts as a training from the start.
    """
    kinds = (Choice.TUNE, Choice.RETRAIN) if choice is Choice.TUNE else (Choice.RETRAIN,)
    for kind in kinds:
        cost = decision.costs.tune if kind is Choice.TUNE else decision.costs.retrain
        taken = [e.hours for e in attempts if e.charge.choice is kind and e.outcome is Outcome.SUCCEEDED]
        known = [*([] if cost is None else [cost]), *taken[-1:]]
        if known:
            return max(known)
    return budget.unknown_gpu_hours


def _judge(decision: Decision, state: FleetState, attempts: Sequence[Entry], working: Entry | None, now: float) -> Step:
    """Return the step of one decision as far as it does not depend on others; START if it may begin."""
    target = state.targets[decision.target]
    answer = state.answers.find(decision)
    choice = decision.choice if answer is None else answer.choice
    priority, figures = measure_priority(decision, target.settings.traffic), describe_decisive_loss(decision)

    def step(action: Action, reason: str, hours: float | None = None, charge: Charge | None = None) -> Step:
        return Step(decision.target, decision.strategy, action, choice, reason, figures, priority, hours, charge)

    if choice is Choice.KEEP:
        return step(Action.KEEP, "the draft is kept" + (f", {answer.describe()}" if answer else ""))
    if target.problem is not None:
        return step(Action.WAIT, target.problem)
    hold = state.answers.holds.get(decision.target)
    if hold is not None:
        return step(Action.WAIT, f"on hold {hold.describe()}")
    if target.settings.hold:
        return step(Action.WAIT, "on hold by its entry")
    outdated = state.outdated.get((decision.target, decision.strategy))
    if outdated is not None:
        return step(Action.WAIT, outdated)
    if working is not None:
        return step(Action.WAIT, f"busy: a {working.charge.choice} of its {working.charge.strategy} draft has begun")
    if target.busy is not None:
        return step(Action.WAIT, f"busy: {target.busy}")
    if choice is Choice.UNDECIDED:
        return step(Action.ASK, "undecided: measure on more prompts, or choose: draftworks accept --choice")
    own = [each for each in attempts if (each.charge.subject, each.charge.choice) == (decision.subject, choice)]
    earlier = _explain_attempts(own, choice, answer, state.budget, now)
    if earlier is not None:
        return step(earlier.action, earlier.reason)
    if answer is None and choice not in ALLOWED[target.settings.act]:
        return step(
            Action.ASK, f"a {choice} waits for a person, act is {target.settings.act}: draftworks accept, or hold"
        )
    if state.budget is None:
        return step(Action.WAIT, "deployment.yaml has no budget: nothing starts by itself")
    hours = estimate_hours(decision, choice, attempts, state.budget)
    if hours is None:
        return step(Action.WAIT, f"what a {choice} costs is not known: set budget.unknown_gpu_hours")
    limit = state.budget.gpu_hours_per_week
    if hours > limit + ROUNDING:
        return step(Action.WAIT, f"needs {hours:.3g} GPU-hours, more than the {limit:g} of a week", hours)
    number = len(own)
    charge = Charge(
        id=digest([decision.target, decision.strategy, decision.subject, choice, number]),
        target=decision.target,
        strategy=decision.strategy,
        choice=choice,
        subject=decision.subject,
        hours=hours,
        ranks=target.ranks.get(decision.strategy, 1),
        at=now,
    )
    why = f"accepted {answer.describe()}" if answer else f"act is {target.settings.act}"
    return step(Action.START, why, hours, charge)


class _NotAgain(NamedTuple):
    """Why a training is not begun again, and whether a person is asked."""

    action: Action
    reason: str


def _explain_attempts(
    attempts: Sequence[Entry], choice: Choice, answer: Answer | None, budget: BudgetSpec | None, now: float
) -> _NotAgain | None:
    """Return why a training is not begun again that was begun for this subject; None if it is. An answer that came
    after the last try starts another one at once."""
    tried = [each for each in attempts if each.outcome is not Outcome.WITHDRAWN]
    if not tried or (answer is not None and answer.at > tried[-1].charge.at):
        return None
    if tried[-1].outcome is Outcome.SUCCEEDED:
        # The rule of promotion has refused what it made, or the decision would be about another draft: only a person goes on.
        said = f"a {choice} was made for this and is not in service: look at it, then draftworks accept, or hold"
        return _NotAgain(Action.ASK, said)
    counted = [each for each in tried if answer is None or each.charge.at >= answer.at]
    failures = len(list(takewhile(lambda each: each.outcome is Outcome.FAILED, reversed(counted))))
    pause = compute_backoff(failures, budget)
    until = tried[-1].at + pause * HOUR_S
    if now >= until:
        return None
    return _NotAgain(
        Action.WAIT, f"a {choice} failed {format_count(failures, 'time')} in a row: tried again after {pause:g} h"
    )


def compute_backoff(failures: int, budget: BudgetSpec | None) -> float:
    """Return the pause in hours after so many failures in a row: doubled with each, up to the longest."""
    spec = BudgetSpec(gpu_hours_per_week=0) if budget is None else budget
    return min(spec.backoff_hours * 2.0 ** min(failures - 1, 60), spec.longest_backoff_hours)


def _spend(steps: Sequence[Step], state: FleetState, now: float) -> list[Step]:
    """Return the steps with those that the budget does not allow turned into waits. The first one that does not fit
    keeps what is left for itself: nothing behind it starts, however small, so that a large one is not passed for ever."""
    limit = 0.0 if state.budget is None else state.budget.gpu_hours_per_week
    used = state.ledger.sum_hours(now)
    first: Step | None = None
    begun: set[str] = set()
    done: list[Step] = []
    for each in steps:
        reason = None
        if each.action is Action.START and each.hours is not None:
            if each.target in begun:
                reason = "busy: another strategy of this target begins"
            elif first is not None:
                reason = f"waits behind {first.target}, {first.strategy}, which the budget is kept for"
            elif used + each.hours > limit + ROUNDING:
                first = each
                reason = f"needs {each.hours:.3g} GPU-hours, {max(limit - used, 0):.3g} of {limit:g} are left this week"
        if reason is not None:
            done.append(replace(each, action=Action.WAIT, reason=reason, charge=None))
            continue
        if each.action is Action.START and each.hours is not None:
            cost = f"{each.hours:.3g} GPU-hours, {max(limit - used, 0):.3g} of {limit:g} were left this week"
            used += each.hours
            begun.add(each.target)
            each = replace(each, figures=f"{each.figures}; {cost}")
        done.append(each)
    return done
