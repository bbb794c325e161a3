"""What starts in a made-up fleet: the product's plan and its ledger of GPU-hours, and people who answer and hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from fleet_simulation import FleetYear, Member
from fleet_world import RANKS, Training

from draftworks.config.operations import BudgetSpec
from draftworks.decision.budget import HOUR_S, WEEK_S, Charge, Correction, Ledger, Outcome
from draftworks.decision.queue import Action, FleetState, Step, TargetState, plan_actions
from draftworks.decision.record import Answer, Answers, Choice, Hold

ANSWERS, ANSWER_DAYS, AGREES = 0.7, (0.5, 10.0), 0.8
WITHDRAWN = 0.02
"""Share of the runs that Dagster never starts."""
OVERRUN = 1.1
WEEK_HOURS = WEEK_S / HOUR_S


@dataclass(frozen=True)
class Spent:
    """A training that a decision started: when it ran, what it took and what was charged for it before."""

    begins: float
    ends: float
    gpu_hours: float
    estimate: float

    def spent_until(self, hour: float) -> float:
        """Return what it had taken at an hour, in GPU-hours."""
        if hour <= self.begins:
            return 0.0
        return self.gpu_hours * min(1.0, (hour - self.begins) / (self.ends - self.begins))


@dataclass(frozen=True)
class Week:
    """The 7 days before a moment: GPU-hours that were truly taken in them, and the most that is promised.

    What can be promised is the budget, and what single trainings took beyond their estimates.
    """

    taken: float
    promised: float


@dataclass
class Acting:
    """Starts what the plan says, step by step.

    Attributes:
        charged: the most that the ledger ever held, looked at after each charge.
        steps: how often each action was planned; a step that says the same as the one before counts once.
        reasons: what was said of each of these steps.
        violations: what must never happen, in words.
    """

    year: FleetYear
    budget: BudgetSpec
    ledger: Ledger = field(default_factory=Ledger)
    answers: Answers = field(default_factory=Answers)
    spent: list[Spent] = field(default_factory=list)
    charged: float = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _events: list[Answer | Hold] = field(default_factory=list)
    _runs: dict[str, Charge] = field(default_factory=dict)
    _said: dict[str, tuple[Action, Choice, str]] = field(default_factory=dict)
    _asked: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.year.settings.seed, 2])
        self.year.act, self.year.on_end, self.year.on_hold = self.act, self.end, self.hold

    def act(self, hour: float) -> None:
        """Plan once, and do it."""
        self._correct_running(hour)
        for step in plan_actions(self._describe(hour), hour * HOUR_S):
            self._note(step, hour)
            if step.action is Action.START:
                self._start(step, hour)

    def end(self, member: Member, training: Training, hour: float) -> None:
        """Correct the ledger to what a training took."""
        charge = self._runs.pop(training.run, None)
        if charge is not None:
            outcome = Outcome.FAILED if training.draft is None else Outcome.SUCCEEDED
            self._correct(charge, training.gpu_hours, hour, outcome)

    def hold(self, member: Member, hour: float) -> None:
        self._say(Hold(member.target.name, member.held, "somebody", "they measure", hour * HOUR_S))

    def list_weeks(self) -> list[Week]:
        """Return the 7 days before each moment at which what is taken in 7 days begins or ceases to grow."""
        moments = [moment for each in self.spent for moment in (each.begins, each.ends, each.begins + WEEK_HOURS)]
        found = []
        for now in moments:
            within = [each for each in self.spent if each.begins < now and each.ends > now - WEEK_HOURS]
            taken = sum(each.spent_until(now) - each.spent_until(now - WEEK_HOURS) for each in within)
            overrun = sum(max(0.0, each.gpu_hours - each.estimate) for each in within)
            found.append(Week(taken, self.budget.gpu_hours_per_week + overrun))
        return found

    def _describe(self, hour: float) -> FleetState:
        targets, decisions, outdated = {}, [], {}
        for name, member in self.year.members.items():
            busy = None if member.running is None else f"run {member.running.run} works for it"
            targets[name] = TargetState(member.target.decision, {"eagle3": RANKS}, busy)
            if member.decided is not None:
                decisions.append(member.decided.decision)
                if member.is_outdated:
                    outdated[name, member.decided.decision.strategy] = (
                        "it changed after that decision: not measured yet"
                    )
        return FleetState(decisions, targets, self.ledger, self.budget, self.answers, outdated)

    def _start(self, step: Step, hour: float) -> None:
        member, charge = self.year.members[step.target], step.charge
        assert charge is not None
        self._look_at_start(member, step, charge)
        self.ledger = self.ledger.add(charge)
        self.charged = max(self.charged, self.ledger.sum_hours(hour * HOUR_S))
        if self.rng.random() < WITHDRAWN:
            self._correct(charge, 0.0, hour, Outcome.WITHDRAWN)
            return
        record = member.service.in_service
        assert record is not None
        kind = "tune" if step.choice is Choice.TUNE else "train"
        origin = member.target.find_draft(record.draft.digest) if kind == "tune" else None
        training = self.year.start(member, kind, hour, origin)
        self._runs[training.run] = charge
        self.spent.append(Spent(hour, training.ends, training.gpu_hours, charge.hours))

    def _look_at_start(self, member: Member, step: Step, charge: Charge) -> None:
        """Note what must never happen: a start on a held or busy target, or a second one for the same cause."""
        if member.held or member.target.decision.hold:
            self.violations.append(f"{step.target}: {step.choice} starts while it is on hold")
        if member.running is not None:
            self.violations.append(f"{step.target}: {step.choice} starts beside {member.running.run}")
        if charge.id in self.ledger.entries:
            self.violations.append(f"{step.target}: charge {charge.id} twice")
        answer = None if member.decided is None else self.answers.find(member.decided.decision)
        for entry in self.ledger.entries.values():
            same = (entry.charge.target, entry.charge.subject, entry.charge.choice) == (
                charge.target,
                charge.subject,
                charge.choice,
            )
            again = answer is not None and answer.at > entry.charge.at
            if same and entry.outcome in (Outcome.OPEN, Outcome.SUCCEEDED) and not again:
                self.violations.append(f"{step.target}: {step.choice} twice for {charge.subject}")

    def _correct_running(self, hour: float) -> None:
        """Do what the sensor does meanwhile: one that takes more than its charge is charged 1.1 times what it took."""
        for run, charge in self._runs.items():
            member = self.year.members[charge.target]
            assert member.running is not None
            assert member.running.run == run
            taken = (hour - member.running.begins) * RANKS
            if taken > self.ledger.entries[charge.id].hours:
                self._correct(charge, OVERRUN * taken, hour, Outcome.OPEN)

    def _correct(self, charge: Charge, hours: float, hour: float, outcome: Outcome) -> None:
        self.ledger = self.ledger.add(Correction(charge.id, hours, hour * HOUR_S, outcome))

    def _note(self, step: Step, hour: float) -> None:
        said = (step.action, step.choice, step.reason)
        if self._said.get(step.target) == said:
            return
        self._said[step.target] = said
        self.steps[str(step.action)] += 1
        self.reasons.append(f"{step.reason}; {step.figures}")
        if step.action is Action.ASK:
            self._ask(step, hour)

    def _ask(self, step: Step, hour: float) -> None:
        """Let somebody answer after some days, mostly as it was decided; each question once."""
        decided = self.year.members[step.target].decided
        assert decided is not None
        decision = decided.decision
        if (step.target, decision.subject) in self._asked or self.rng.random() > ANSWERS:
            return
        self._asked.add((step.target, decision.subject))
        others = (Choice.KEEP, Choice.TUNE, Choice.RETRAIN)
        agrees = decision.choice is not Choice.UNDECIDED and self.rng.random() < AGREES
        choice = decision.choice if agrees else others[int(self.rng.integers(len(others)))]
        later = hour + 24 * float(self.rng.uniform(*ANSWER_DAYS))
        at = later * HOUR_S
        answer = Answer(step.target, decision.strategy, decision.subject, choice, "somebody", "it is time", at)  # pyright: ignore[reportArgumentType] - one of the three
        self.year.at(later, lambda _: self._say(answer))

    def _say(self, event: Answer | Hold) -> None:
        self._events.append(event)
        self.answers = Answers.of(self._events)
