"""A year of a made-up fleet in simulated time: what happens, what the product decides and does about it, what comes of it.

The product's: the statistics, the rule of promotion and the records of drafts in service (real files), the rule of
decisions and its records, what is started and when, and the ledger of GPU-hours. Made up: the targets, their drafts and
what happens to them (`fleet_world`), reports without files (`fleet_service`), and the programs that train.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from fleet_losses import Decided, decide_target
from fleet_outcome import Outcome, Promotion
from fleet_service import ToyService
from fleet_truth import Draft
from fleet_world import Change, Event, Kind, ToyTarget, Training, draw_events

from draftworks.decision.record import Choice, Costs
from draftworks.evaluation.ladder.statistics import Resampling

EVALUATION_HOURS = (1.0, 12.0)
LAST_FIRST_TRAINING = 7 * 24.0


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation.

    Attributes:
        step_hours: time between two looks at what is to be started.
        resamples: of each bootstrap.
    """

    seed: int
    targets: int = 30
    days: int = 365
    step_hours: float = 6.0
    resamples: int = 500

    @property
    def hours(self) -> float:
        return 24.0 * self.days


@dataclass
class Member:
    """A target of the fleet with all that is known of it.

    Attributes:
        running: the training that runs; None if there is none.
        is_outdated: whether the decision is about what was there before a change.
        since, loss: from when on the draft in service has its present true loss, and what that is; see `Outcome`.
    """

    target: ToyTarget
    service: ToyService
    rng: np.random.Generator
    held: bool = False
    running: Training | None = None
    decided: Decided | None = None
    is_outdated: bool = False
    costs: Costs = Costs()
    since: float = 0.0
    loss: float | None = None
    excess: float | None = None


@dataclass
class FleetYear:
    """The fleet, and the queue of what happens next.

    Attributes:
        act: called at each step with the hour; starts what the product says.
        on_end: called when a training has ended that `act` started, or a person.
        on_hold: called when a target was put on hold, or released.
    """

    settings: Settings
    var: Path
    members: dict[str, Member] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    act: Callable[[float], None] = lambda _: None
    on_end: Callable[[Member, Training, float], None] = lambda *_: None
    on_hold: Callable[[Member, float], None] = lambda *_: None
    _queue: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        seed = self.settings.seed
        resampling = Resampling(resamples=self.settings.resamples)
        for index in range(self.settings.targets):
            target = ToyTarget.make(index, seed)
            service = ToyService(target, self.var, resampling, seed)
            member = Member(target, service, np.random.default_rng([seed, index, 1]))
            self.members[target.name] = member
            first = Event(float(member.rng.uniform(0, LAST_FIRST_TRAINING)), target.name, Change.TRAINING)
            for event in [first, *draw_events(target, self.settings.hours)]:
                self.at(event.hour, lambda hour, event=event: self._happen(event, hour))

    def at(self, hour: float, do: Callable[[float], None]) -> None:
        """Let something happen at an hour."""
        heapq.heappush(self._queue, (hour, next(self._numbers), do))

    def run(self) -> Outcome:
        """Let the time pass, and return what came of it."""
        for step in range(1, round(self.settings.hours / self.settings.step_hours) + 1):
            now = step * self.settings.step_hours
            while self._queue and self._queue[0][0] <= now:
                hour, _, do = heapq.heappop(self._queue)
                do(hour)
            self.act(now)
        for member in self.members.values():
            self._account(member, self.settings.hours)
        return self.outcome

    def start(self, member: Member, kind: Kind, hour: float, start_from: Draft | None = None) -> Training:
        """Start a training of a target that has none."""
        assert member.running is None
        made = member.target.begin_training(kind, hour, start_from)
        member.running = made
        self.at(made.ends, lambda now: self._end(member, made, now))
        return made

    def _happen(self, event: Event, hour: float) -> None:
        member = self.members[event.target]
        target = member.target
        changes = {
            Change.WEIGHTS: target.change_weights,
            Change.TRAFFIC: target.change_traffic,
            Change.EVAL_SET: target.change_eval_set,
            Change.NEW_EVAL_SET: target.add_eval_set,
        }
        if event.change in (Change.HOLD, Change.RELEASE):
            member.held = event.change is Change.HOLD
            self.on_hold(member, hour)
        elif event.change is Change.TRAINING:
            if member.running is None:
                self.start(member, "train", hour)
            elif not target.drafts:
                self.at(hour + 24, lambda later: self._happen(event, later))
        else:
            changes[event.change]()
            member.is_outdated = True
            self._account(member, hour)
            self.at(hour + float(member.rng.uniform(*EVALUATION_HOURS)), lambda now: self._evaluate(member, now))

    def _evaluate(self, member: Member, hour: float) -> None:
        """Do what the job `evaluate` does: measure the newest draft, and the one in service if it is not that, and decide."""
        if member.target.drafts:
            member.service.evaluate(member.target.newest)
            record = member.service.in_service
            if record is not None:
                member.service.evaluate(member.target.find_draft(record.draft.digest))
            self._decide(member, hour)

    def _end(self, member: Member, training: Training, hour: float) -> None:
        member.running = None
        draft = training.draft
        self.outcome.end_training(training.kind, draft is not None)
        if draft is None:
            if not member.target.drafts:
                self._happen(Event(hour, member.target.name, Change.TRAINING), hour)
        else:
            member.target.drafts.append(draft)
            costs = {"tune": member.costs.tune, "retrain": member.costs.retrain}
            costs["tune" if training.kind == "tune" else "retrain"] = training.gpu_hours
            member.costs = Costs(**costs)
            member.service.evaluate(draft)
            self._promote(member, draft, hour)
            self._decide(member, hour)
        self.on_end(member, training, hour)

    def _promote(self, member: Member, draft: Draft, hour: float) -> None:
        """Put a draft into service if the rule accepts it; look then at the true values."""
        target, service = member.target, member.service
        if draft.target_digest != target.digest:
            self.outcome.refused_as_stale += 1
            return
        judged = service.judge(draft)
        self.outcome.judged += [
            (each, str(found.verdict)) for each, found in zip(judged.facts, judged.figures, strict=True)
        ]
        self.outcome.reasons.append(judged.describe())
        if not judged.accepted:
            self.outcome.refused += 1
            return
        earlier = service.list_earlier()
        behind = {
            name: max((target.value_of(each, name) - target.value_of(draft, name) for each in earlier), default=None)
            for name in target.evals
        }
        excess = [lost - target.service.select_margin(name) for name, lost in behind.items() if lost is not None]
        old = None if service.in_service is None else target.find_draft(service.in_service.draft.digest)
        lost = 0.0 if old is None else max(target.value_of(old, name) - target.value_of(draft, name) for name in behind)
        self.outcome.promotions.append(
            Promotion(target.name, hour, draft.digest, max(excess, default=None), lost, judged.describe())
        )
        service.promote(judged, hour, judged.describe())
        self._account(member, hour)

    def _decide(self, member: Member, hour: float) -> None:
        decided = decide_target(member.service, hour, member.costs)
        if decided is None:
            if member.service.in_service is not None:
                self.outcome.not_decided += 1
            return
        self.outcome.decided.append((decided.facts, str(decided.decision.choice)))
        for found, facts in zip(decided.decision.figures, decided.facts["eval_sets"], strict=True):
            if found.choice is Choice.UNDECIDED and found.loss is not None:
                self.outcome.needed.append((decided.facts["margins"], facts, found.needed))
        self.outcome.reasons += decided.decision.reasons
        self.outcome.wrong_decisions += decided.is_wrong
        member.decided, member.is_outdated = decided, False

    def _account(self, member: Member, hour: float) -> None:
        """Add the hours since the last change to what the draft in service has truly lost, and look at it anew."""
        if member.loss is not None and member.excess is not None:
            self.outcome.add_hours(hour - member.since, member.loss, member.excess)
        target, record = member.target, member.service.in_service
        member.since, member.loss, member.excess = hour, None, None
        if record is None or record.draft.target_digest != target.digest:
            return
        draft, earlier = target.find_draft(record.draft.digest), member.service.list_earlier()
        lost = {
            name: max(target.value_of(each, name) for each in earlier) - target.value_of(draft, name)
            for name in target.evals
        }
        member.loss = max(lost.values())
        member.excess = max(value - target.service.select_margin(name) for name, value in lost.items())
