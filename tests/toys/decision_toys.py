"""Decisions with made-up figures, and fleets of them."""

from __future__ import annotations

from typing import Any

from draftworks.config.operations import BudgetSpec, DecisionSpec
from draftworks.decision.budget import Charge, Correction, Ledger, Outcome
from draftworks.decision.queue import FleetState, Step, TargetState, plan_actions
from draftworks.decision.record import Answers, Choice, Costs, Decision, EvalLoss, Margins, Reference

NOW = 1_800_000_000.0
HOUR = 3600.0
DAY = 24 * HOUR
WEEK = 7 * DAY


def decided(
    target: str = "small",
    choice: Choice = Choice.RETRAIN,
    loss: float = 0.2,
    strategy: str = "eagle3",
    subject: str = "subject",
    tune: float | None = 1.0,
    retrain: float | None = 4.0,
) -> Decision:
    """A decision about one eval set."""
    one = EvalLoss("heldout", choice, Reference.SAME_PROMPTS, "served", 2.0, 2.0 + loss, loss, loss, loss, 50, 50)
    return Decision(
        target=target,
        strategy=strategy,
        choice=choice,
        draft="served",
        target_digest="0123456789abcdef",
        subject=subject,
        figures=(one,),
        reasons=("because",),
        margins=Margins(0.05, 0.15, 20),
        costs=Costs(tune, retrain),
        after_tune=None,
        when="2026-05-01T12:00:00+00:00",
        number=1,
    )


def acting(traffic: float = 1.0, act: str = "retrain", busy: str | None = None, **settings: Any) -> TargetState:
    """A target that acts by itself."""
    return TargetState(DecisionSpec(act=act, traffic=traffic, **settings), {"eagle3": 2}, busy)  # type: ignore[arg-type]


def fleet(
    *decisions: Decision,
    limit: float | None = 100.0,
    ledger: Ledger | None = None,
    answers: Answers | None = None,
    **targets: TargetState,
) -> FleetState:
    """A fleet whose targets act by themselves, but for those that are given."""
    states = {each.target: targets.get(each.target, acting()) for each in decisions}
    budget = None if limit is None else BudgetSpec(gpu_hours_per_week=limit)
    return FleetState(decisions, states, ledger or Ledger(), budget, answers or Answers())


def charged(name: str = "a", hours: float = 1.0, at: float = NOW, target: str = "", **changed: Any) -> Charge:
    fields = {"strategy": "eagle3", "choice": Choice.RETRAIN, "subject": "subject", "ranks": 2, **changed}
    return Charge(id=name, target=target or f"t-{name}", hours=hours, at=at, **fields)


def ended(charge: Charge, hours: float, at: float, outcome: Outcome = Outcome.SUCCEEDED) -> Correction:
    return Correction(charge.id, hours, at, outcome, run=f"run-{charge.id}")


def plan_one(state: FleetState, now: float = NOW) -> Step:
    [step] = plan_actions(state, now)
    return step
