"""What came of a simulated year: figures against the true values, and all that was judged, for an oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Promotion:
    """A draft that was put into service.

    Attributes:
        excess: how much more than the margin it is truly behind the best draft that was in service for these weights, on
            the worst eval set; negative: it is within the margin; None: it is the first draft for these weights.
        lost: what it truly has less than the draft that it replaced, on the worst eval set.
    """

    target: str
    hour: float
    draft: str
    excess: float | None
    lost: float
    reason: str

    @property
    def is_wrong(self) -> bool:
        return self.excess is not None and self.excess > 0


@dataclass
class Outcome:
    """Counts and records of a year.

    Attributes:
        judged: facts for `oracle_promote` with the product's verdict, of each draft and eval set.
        decided: facts for `oracle_decide` with the product's choice.
        needed: margins, facts of an undecided eval set with a loss, and how many prompts the product says would decide.
        wrong_decisions: those that the true losses do not call for, on any eval set; `undecided` is never wrong.
        reasons: everything that the product said.
        hours: target-hours with a draft in service that was trained for the target's weights.
        hours_beyond: those of them in which it truly was more than the margin behind the best one ever in service for these
            weights, on any eval set.
        loss_hours: integral over `hours` of how far it was behind, on the worst eval set.
        largest_excess: the most that it ever was behind beyond the margin; negative: it always was within.
        not_decided: how often nothing was decided since the draft in service was not measured on what was there.
    """

    promotions: list[Promotion] = field(default_factory=list)
    judged: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    decided: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    needed: list[tuple[dict[str, Any], dict[str, Any], int | None]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    wrong_decisions: int = 0
    refused: int = 0
    refused_as_stale: int = 0
    not_decided: int = 0
    trainings: Counter[str] = field(default_factory=Counter)
    hours: float = 0.0
    hours_beyond: float = 0.0
    loss_hours: float = 0.0
    largest_excess: float = float("-inf")

    @property
    def compared(self) -> list[Promotion]:
        """The promotions that had an earlier draft for the same weights to be compared with."""
        return [each for each in self.promotions if each.excess is not None]

    @property
    def wrong(self) -> list[Promotion]:
        return [each for each in self.promotions if each.is_wrong]

    @property
    def choices(self) -> Counter[str]:
        return Counter(choice for _, choice in self.decided)

    @property
    def mean_loss(self) -> float:
        return self.loss_hours / self.hours if self.hours else 0.0

    def end_training(self, kind: str, succeeded: bool) -> None:
        self.trainings[kind if succeeded else f"{kind} failed"] += 1

    def add_hours(self, hours: float, loss: float, excess: float) -> None:
        self.hours += hours
        self.hours_beyond += hours * (excess > 0)
        self.loss_hours += hours * loss
        self.largest_excess = max(self.largest_excess, excess)
