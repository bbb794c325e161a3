"""The figures of a simulated year of a made-up fleet, as a table and a test read them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fleet_acting import Acting
from fleet_outcome import Outcome
from fleet_simulation import FleetYear, Settings

from draftworks.config.operations import BudgetSpec

GPU_HOURS_PER_TARGET = 4.0
"""Weekly budget: enough for one training in six weeks of each target, so that a change of many makes a queue."""
UNKNOWN_GPU_HOURS = 20.0


@dataclass(frozen=True)
class Figures:
    """Figures of one or several years.

    Attributes:
        compared: promotions of drafts that had an earlier one for the same weights.
        wrong: of these, drafts that truly are more than the margin below the best one before.
        worse_firsts: promotions of a first draft for new weights that truly is 0.1 or more below the one it replaced.
        not_decided: changes after which nothing could be decided, as the draft in service was not measured.
        hours_beyond: share of the time in which the draft in service was truly more than the margin below the best one.
        mean_loss: accepted tokens per pass that it was below the best one, on average over that time.
        gpu_hours: of trainings that decisions started, in the year; `most_in_a_week` in any 7 days.
        charged: the most that the ledger ever held.
    """

    targets: int
    days: int
    promotions: int
    compared: int
    wrong: int
    refused: int
    worse_firsts: int
    decisions: dict[str, int]
    wrong_decisions: int
    not_decided: int
    steps: dict[str, int]
    trainings: dict[str, int]
    mean_loss: float
    hours_beyond: float
    largest_excess: float
    gpu_hours: float
    most_in_a_week: float
    charged: float
    budget: float
    violations: int
    cpu_seconds: float


@dataclass(frozen=True)
class Year:
    """A year that is over."""

    outcome: Outcome
    acting: Acting
    figures: Figures


def simulate(settings: Settings, var: Path) -> Year:
    """Let a year pass; `var` is an empty folder."""
    began = time.process_time()
    fleet = FleetYear(settings, var)
    weekly = GPU_HOURS_PER_TARGET * settings.targets
    acting = Acting(fleet, BudgetSpec(gpu_hours_per_week=weekly, unknown_gpu_hours=UNKNOWN_GPU_HOURS))
    outcome = fleet.run()
    return Year(outcome, acting, _collect(settings, outcome, acting, began))


def _collect(settings: Settings, outcome: Outcome, acting: Acting, began: float) -> Figures:
    return Figures(
        targets=settings.targets,
        days=settings.days,
        promotions=len(outcome.promotions),
        compared=len(outcome.compared),
        wrong=len(outcome.wrong),
        refused=outcome.refused,
        worse_firsts=sum(each.excess is None and each.lost >= 0.1 for each in outcome.promotions),
        decisions=_sort(outcome.choices),
        wrong_decisions=outcome.wrong_decisions,
        not_decided=outcome.not_decided,
        steps=_sort(acting.steps),
        trainings=_sort(outcome.trainings),
        mean_loss=outcome.mean_loss,
        hours_beyond=outcome.hours_beyond / outcome.hours if outcome.hours else 0.0,
        largest_excess=outcome.largest_excess,
        gpu_hours=sum(each.gpu_hours for each in acting.spent),
        most_in_a_week=max((week.taken for week in acting.list_weeks()), default=0.0),
        charged=acting.charged,
        budget=acting.budget.gpu_hours_per_week,
        violations=len(acting.violations),
        cpu_seconds=time.process_time() - began,
    )


def _sort(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
