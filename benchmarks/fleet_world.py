"""A made-up fleet: targets whose weights, traffic and eval sets change, and trainings that end well, badly or not at all.

Everything is drawn from one seed. A target's random numbers are its own, so that what happens to one target does not
depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from fleet_truth import Draft, EvalSet, true_value

from draftworks.config.operations import DecisionSpec
from draftworks.config.service import ServiceSpec
from draftworks.targets.registry import HELDOUT

HOURS_PER_YEAR = 365 * 24
Kind = Literal["tune", "train"]


class Change(StrEnum):
    """What happens to a target by itself."""

    WEIGHTS = "weights"
    """The target is replaced: its drafts lose something, and all eval data is made again."""
    TRAFFIC = "traffic"
    """One eval set gets prompts of other traffic, on which earlier drafts lose something."""
    EVAL_SET = "eval_set"
    """One eval set gets other prompts of the same traffic: nothing is truly lost."""
    NEW_EVAL_SET = "new_eval_set"
    """The target gets one more eval set."""
    HOLD = "hold"
    RELEASE = "release"
    TRAINING = "training"
    """Somebody trains a draft without having been told to."""


PER_YEAR = {
    Change.WEIGHTS: 2.0,
    Change.TRAFFIC: 3.0,
    Change.TRAINING: 5.0,
    Change.EVAL_SET: 1.5,
    Change.NEW_EVAL_SET: 0.3,
    Change.HOLD: 0.5,
}
LOSSES = (0.02, 0.1, 0.3)
"""Scales of what a change costs the drafts before it; one of them is drawn, so that all choices are right at times."""
EVAL_SETS = (HELDOUT, "code", "chat")
PROMPTS = (12, 60, 200, 600, 1200)
FAILS, TUNE_HELPS, TRAINS_BADLY = 0.1, 0.7, 0.15
DAYS_OF_HOLD = (3.0, 30.0)
TRAIN_HOURS, TUNE_HOURS, SPREAD_OF_HOURS = 24.0, 6.0, 0.35
RANKS = 8


@dataclass(frozen=True)
class Event:
    hour: float
    target: str
    change: Change


@dataclass(frozen=True)
class Training:
    """A training that runs.

    Attributes:
        draft: None if it fails.
        gpu_hours: that it takes in the end, known to nobody before.
        run: its name.
    """

    run: str
    kind: Kind
    begins: float
    gpu_hours: float
    draft: Draft | None

    @property
    def ends(self) -> float:
        return self.begins + self.gpu_hours / RANKS


@dataclass
class ToyTarget:
    """A target as it is now.

    Attributes:
        digest: of its weights.
        traffic: version of each eval set's traffic.
        lost: what the drafts that were trained before a change have lost by it: of each (eval set, version of its
            traffic) and of each digest of the weights.
        level: what a usual draft of this target has over the fleet's.
        drafts: every draft that was trained, oldest first.
    """

    name: str
    service: ServiceSpec
    decision: DecisionSpec
    rng: np.random.Generator
    evals: dict[str, EvalSet]
    digest: str = "0" * 16
    traffic: dict[str, int] = field(default_factory=dict)
    lost: dict[tuple[str, int], float] = field(default_factory=dict)
    lost_by_weights: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    drafts: list[Draft] = field(default_factory=list)
    made: int = 0

    @classmethod
    def make(cls, index: int, seed: int) -> ToyTarget:
        rng = np.random.default_rng([seed, index])
        name = f"t{index:03}"
        names = EVAL_SETS[: 1 + int(rng.integers(len(EVAL_SETS)))]
        evals = {
            each: EvalSet(each, f"{name}-{each}-0", int(rng.choice(PROMPTS)), rng.uniform(1.2, 2.4)) for each in names
        }
        margin = float(rng.choice([0.03, 0.05, 0.1]))
        service = ServiceSpec(margin=margin, margins={names[-1]: margin / 2} if rng.random() < 0.2 else {})
        act = ("none", "tune", "retrain", "retrain")[int(rng.integers(4))]
        hold = bool(rng.random() < 0.05)
        decision = DecisionSpec(act=act, traffic=round(float(rng.lognormal(0, 1)), 3), hold=hold)
        made = cls(name, service, decision, rng, evals, level=rng.normal(0, 0.1))
        made.traffic = dict.fromkeys(names, 0)
        made.digest = made._name("w")
        return made

    @property
    def newest(self) -> Draft:
        return self.drafts[-1]

    def find_draft(self, digest: str) -> Draft:
        return next(each for each in self.drafts if each.digest == digest)

    def mean_of(self, draft: Draft, eval_set: str) -> float:
        """Return what `measure` and `true_value` need of a draft as things are now."""
        now = self.traffic[eval_set]
        traffic = sum(self.lost[eval_set, version] for version in range(draft.traffic.get(eval_set, 0) + 1, now + 1))
        digests = [*self.lost_by_weights]
        since = digests[digests.index(draft.target_digest) + 1 :] if draft.target_digest in digests else digests
        weights = sum(self.lost_by_weights[each] for each in since)
        own = draft.level + draft.by_eval_set.get(eval_set, 0.0)
        return self.evals[eval_set].usual + own - traffic - weights

    def value_of(self, draft: Draft, eval_set: str) -> float:
        """Return the true accepted tokens per pass of a draft as things are now."""
        return true_value(self.mean_of(draft, eval_set))

    def change_weights(self) -> None:
        self.digest = self._name("w")
        self.lost_by_weights[self.digest] = self._draw_loss()
        for name in self.evals:
            self._draw_prompts(name, self.rng.normal(0, 0.05))

    def change_traffic(self) -> None:
        name = str(self.rng.choice(list(self.evals)))
        self.traffic[name] += 1
        self.lost[name, self.traffic[name]] = self._draw_loss()
        self._draw_prompts(name, self.rng.normal(0, 0.08))

    def change_eval_set(self) -> None:
        self._draw_prompts(str(self.rng.choice(list(self.evals))), 0.0)

    def add_eval_set(self) -> None:
        missing = [name for name in EVAL_SETS if name not in self.evals]
        if missing:
            prompts, usual = int(self.rng.choice(PROMPTS)), float(self.rng.uniform(1.2, 2.4))
            self.evals[missing[0]] = EvalSet(missing[0], self._name(f"{missing[0]}-"), prompts, usual)
            self.traffic[missing[0]] = 0

    def begin_training(self, kind: Kind, now: float, start_from: Draft | None) -> Training:
        """Draw what a training gives that begins now; it sees the traffic and the weights as they are."""
        rng, run = self.rng, self._name("r")
        usual = TUNE_HOURS if kind == "tune" else TRAIN_HOURS
        hours = usual * float(rng.lognormal(0, SPREAD_OF_HOURS))
        if rng.random() < FAILS:
            return Training(run, kind, now, hours * float(rng.uniform(0.05, 1)), None)
        if kind == "tune":
            assert start_from is not None
            level = start_from.level + rng.normal(0, 0.03)
            if rng.random() > TUNE_HELPS:
                gone = [self.evals[name].usual + level - self.mean_of(start_from, name) for name in self.evals]
                level -= 0.8 * max(0.0, *gone)
        else:
            level = self.level + rng.normal(0, 0.06)
            if rng.random() < TRAINS_BADLY:
                level -= abs(rng.normal(0, 0.15))
        by_eval_set = {name: float(rng.normal(0, 0.03)) for name in self.evals}
        origin = None if start_from is None else start_from.digest
        digest = self._name("d")
        draft = Draft(digest, now, kind, float(level), by_eval_set, self.digest, dict(self.traffic), origin)
        return Training(run, kind, now, hours, draft)

    def _draw_loss(self) -> float:
        return abs(self.rng.normal(0, float(self.rng.choice(LOSSES))))

    def _draw_prompts(self, name: str, harder: float) -> None:
        old = self.evals[name]
        prompts = int(self.rng.choice(PROMPTS)) if self.rng.random() < 0.3 else old.prompts
        self.evals[name] = replace(old, data=self._name(f"{name}-"), prompts=prompts, usual=old.usual - harder)

    def _name(self, kind: str) -> str:
        self.made += 1
        return f"{self.name}{kind}{self.made:04}"


def draw_events(target: ToyTarget, hours: float) -> list[Event]:
    """Return what happens to a target by itself, in order."""
    found: list[Event] = []
    for change, rate in PER_YEAR.items():
        for hour in _draw_hours(target.rng, rate, hours):
            found.append(Event(hour, target.name, change))
            if change is Change.HOLD:
                ends = hour + 24 * float(target.rng.uniform(*DAYS_OF_HOLD))
                found.append(Event(ends, target.name, Change.RELEASE))
    return sorted(found, key=lambda each: each.hour)


def _draw_hours(rng: np.random.Generator, per_year: float, hours: float) -> Sequence[float]:
    count = int(rng.poisson(per_year * hours / HOURS_PER_YEAR))
    return sorted(rng.uniform(0, hours, count).tolist())
