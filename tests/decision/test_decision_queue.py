"""What starts now: within the budget, the largest traffic x loss first, with a reason for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from decision_toys import DAY, HOUR, NOW, WEEK, acting, charged, decided, ended, fleet, plan_one
from hypothesis import given
from hypothesis import strategies as st

from draftworks.config.operations import BudgetSpec
from draftworks.decision.budget import Charge, Ledger, Outcome
from draftworks.decision.queue import Action, FleetState, Step, TargetState, plan_actions
from draftworks.decision.record import Answer, Answers, Choice, Hold

CHOICES = st.sampled_from([Choice.KEEP, Choice.TUNE, Choice.RETRAIN, Choice.UNDECIDED])


def answered(choice: Choice, at: float = NOW, subject: str = "subject") -> Answers:
    return Answers({("small", "eagle3"): Answer("small", "eagle3", subject, choice, "me", "why", at)})


def started(steps: Sequence[Step]) -> list[str]:
    return [step.target for step in steps if step.action is Action.START]


def reasons(steps: Sequence[Step]) -> dict[str, str]:
    return {step.target: step.reason for step in steps}


def with_attempts(*outcomes: Outcome, at: float = NOW, apart: float = HOUR) -> Ledger:
    """Trainings of `small` for the subject, one after the other, each of which ended when the next began."""
    ledger = Ledger()
    for number, outcome in enumerate(outcomes):
        charge = charged(str(number), at=at + number * apart, target="small")
        ledger = ledger.add(charge, ended(charge, 1.0, charge.at, outcome))
    return ledger


@st.composite
def fleets(draw) -> FleetState:
    decisions, targets = [], {}
    for index in range(draw(st.integers(1, 8))):
        name = f"t{index}"
        hours = draw(st.sampled_from([None, 0.0, 0.5, 3.0, 9.0, 200.0]))
        loss = draw(st.sampled_from([-0.1, 0.0, 0.1, 0.3]))
        for strategy in draw(st.sampled_from([("eagle3",), ("eagle3", "dflash")])):
            decisions.append(decided(name, draw(CHOICES), loss, strategy, tune=None, retrain=hours))
        act = draw(st.sampled_from(["none", "tune", "retrain", "retrain"]))
        busy = draw(st.sampled_from([None, None, "a run works"]))
        targets[name] = acting(draw(st.sampled_from([0.0, 1.0, 2.5])), act, busy, hold=draw(st.booleans()))
    old = charged("old", draw(st.floats(0, 8)), NOW - DAY)
    ledger = Ledger().add(old, ended(old, old.hours, NOW - DAY))
    limit = draw(st.sampled_from([None, 0.0, 10.0, 12.5]))
    return fleet(*decisions, limit=limit, ledger=ledger, **targets)


@given(fleets())
def test_each_decision_gets_one_step_with_a_reason_and_the_budget_holds(state: FleetState):
    steps = plan_actions(state, NOW)
    assert sorted((s.target, s.strategy) for s in steps) == sorted((d.target, d.strategy) for d in state.decisions)
    assert all(step.reason for step in steps)
    begun = [step for step in steps if step.action is Action.START]
    charges = [step.charge for step in begun]
    assert all((step.charge is not None) == (step.action is Action.START) for step in steps)
    if state.budget is None:
        assert not begun
    else:
        assert state.ledger.select([c for c in charges if c], state.budget.gpu_hours_per_week, NOW) == charges
    assert len({step.target for step in begun}) == len(begun)
    for step in begun:
        target = state.targets[step.target]
        assert target.busy is None
        assert not target.settings.hold
        assert target.settings.act == "retrain" or step.choice.value == target.settings.act
    assert [s.priority for s in steps] == sorted((s.priority for s in steps), reverse=True)


@given(fleets(), st.randoms())
def test_the_order_of_the_decisions_does_not_matter(state: FleetState, random):
    shuffled = list(state.decisions)
    random.shuffle(shuffled)
    assert plan_actions(replace(state, decisions=shuffled), NOW) == plan_actions(state, NOW)


@given(fleets())
def test_nothing_passes_one_that_waits_for_the_budget(state: FleetState):
    steps = plan_actions(state, NOW)
    kept = [index for index, step in enumerate(steps) if "are left this week" in step.reason]
    assert len(kept) <= 1
    assert all(step.action is not Action.START for index in kept for step in steps[index:])


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_whatever_fits_into_a_week_starts_at_some_time(hours: list[float], losses: list[float]):
    decisions = [decided(f"t{i}", loss=losses[i], retrain=each) for i, each in enumerate(hours)]
    ledger, now, begun = Ledger(), NOW, set[str]()
    for _ in range(len(hours) + 1):
        for step in plan_actions(fleet(*decisions, limit=10.0, ledger=ledger), now):
            if step.charge is not None:
                ledger = ledger.add(step.charge, ended(step.charge, step.charge.hours, now))
                begun.add(step.target)
        assert ledger.sum_hours(now) <= 10.0 + 1e-6
        now += WEEK
    assert len(begun) == len(hours)


def test_the_largest_traffic_times_loss_is_first_and_names_break_ties():
    state = fleet(
        *(decided(name, loss=loss) for name, loss in {"d": 0.2, "c": 0.2, "b": 0.4, "a": 0.1}.items()),
        a=acting(traffic=10.0),
    )
    assert started(plan_actions(state, NOW)) == ["a", "b", "c", "d"]


def test_a_step_names_the_loss_and_a_start_its_hours():
    steps = plan_actions(fleet(decided("a", loss=0.4, retrain=80), decided("b", loss=0.1, retrain=15)), NOW)
    assert "on heldout; 80 GPU-hours, 100 of 100 were left this week" in steps[0].figures
    assert "on heldout; 15 GPU-hours, 20 of 100 were left this week" in steps[1].figures
    assert steps[0].figures.startswith("lost +0.400 accepted tokens per pass (")


def test_a_cheap_one_waits_behind_an_expensive_one_that_does_not_fit():
    state = fleet(decided("big", loss=0.9, retrain=80), decided("small", loss=0.1, retrain=1), limit=100)
    old = charged("old", 30.0, NOW - DAY)
    ledger = Ledger().add(old, ended(old, 30.0, NOW - DAY))
    steps = plan_actions(replace(state, ledger=ledger), NOW)
    assert reasons(steps) == {
        "big": "needs 80 GPU-hours, 70 of 100 are left this week",
        "small": "waits behind big, eagle3, which the budget is kept for",
    }
    assert started(plan_actions(replace(state, ledger=ledger), NOW - DAY + WEEK)) == ["big", "small"]


def test_one_that_never_fits_keeps_nothing_for_itself():
    state = fleet(decided("big", loss=0.9, retrain=101), decided("small", loss=0.1, retrain=1), limit=100)
    steps = plan_actions(state, NOW)
    assert started(steps) == ["small"]
    assert "more than the 100 of a week" in reasons(steps)["big"]


def test_the_whole_budget_may_be_used():
    assert started(plan_actions(fleet(decided("a", retrain=6), decided("b", retrain=4), limit=10), NOW)) == ["a", "b"]


@pytest.mark.parametrize(
    ("act", "choice", "action"),
    [
        ("none", Choice.TUNE, Action.ASK),
        ("none", Choice.RETRAIN, Action.ASK),
        ("tune", Choice.TUNE, Action.START),
        ("tune", Choice.RETRAIN, Action.ASK),
        ("retrain", Choice.TUNE, Action.START),
        ("retrain", Choice.RETRAIN, Action.START),
        ("retrain", Choice.UNDECIDED, Action.ASK),
        ("retrain", Choice.KEEP, Action.KEEP),
    ],
)
def test_only_what_the_entry_allows_starts_by_itself(act: str, choice: Choice, action: Action):
    assert plan_one(fleet(decided(choice=choice), small=acting(act=act))).action is action


def test_an_accepted_one_starts_without_leave_of_the_entry_and_within_the_budget():
    asked = fleet(decided(choice=Choice.UNDECIDED), small=acting(act="none"), answers=answered(Choice.TUNE))
    step = plan_one(asked)
    assert (step.action, step.choice, step.hours) == (Action.START, Choice.TUNE, 1.0)
    assert "accepted by me" in step.reason
    assert plan_one(replace(asked, budget=BudgetSpec(gpu_hours_per_week=0.5))).action is Action.WAIT


def test_an_answer_keep_stops_and_an_answer_to_another_subject_does_not_count():
    assert plan_one(fleet(decided(), answers=answered(Choice.KEEP))).action is Action.KEEP
    assert plan_one(fleet(decided(), answers=answered(Choice.KEEP, subject="old"))).action is Action.START


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (fleet(decided(), small=acting(hold=True)), "on hold by its entry"),
        (fleet(decided(), answers=Answers(holds={"small": Hold("small", True, "me", "a test", NOW)})), "a test"),
        (fleet(decided(), small=acting(busy="run 1 works")), "busy: run 1 works"),
        (fleet(decided(), limit=None), "no budget"),
        (fleet(decided(retrain=None)), "unknown_gpu_hours"),
        (fleet(decided(), small=TargetState(acting().settings, problem="cannot be read")), "cannot be read"),
        (replace(fleet(decided()), outdated={("small", "eagle3"): "of another draft"}), "of another draft"),
        (fleet(decided(), ledger=Ledger().add(charged(target="small"))), "busy: a retrain"),
    ],
)
def test_what_cannot_start_waits_and_says_why(state: FleetState, said: str):
    step = plan_one(state)
    assert step.action is Action.WAIT
    assert said in step.reason


def test_two_strategies_of_a_target_do_not_start_together():
    steps = plan_actions(fleet(decided(loss=0.3), decided(loss=0.2, strategy="dflash")), NOW)
    assert [step.action for step in steps] == [Action.START, Action.WAIT]
    assert "another strategy" in steps[1].reason


@pytest.mark.parametrize(("failures", "pause"), [(1, 1.0), (2, 2.0), (3, 4.0), (9, 168.0)])
def test_the_pause_doubles_with_each_failure(failures: int, pause: float):
    state = fleet(decided(), ledger=with_attempts(*[Outcome.FAILED] * failures))
    last = NOW + (failures - 1) * HOUR
    assert plan_one(state, last + pause * HOUR - 1).action is Action.WAIT
    assert plan_one(state, last + pause * HOUR).action is Action.START


def test_what_failed_for_another_subject_does_not_count():
    assert plan_one(fleet(decided(subject="new"), ledger=with_attempts(Outcome.FAILED))).action is Action.START


def test_what_was_made_is_not_made_again_until_something_changes_or_a_person_asks():
    made = with_attempts(Outcome.SUCCEEDED)
    again = plan_one(fleet(decided(), ledger=made), NOW + 99 * DAY)
    assert again.action is Action.ASK
    assert "was made" in again.reason
    assert plan_one(fleet(decided(subject="new"), ledger=made)).action is Action.START
    assert plan_one(fleet(decided(choice=Choice.TUNE), ledger=made)).action is Action.START
    assert plan_one(fleet(decided(), ledger=made, answers=answered(Choice.RETRAIN, NOW))).action is Action.ASK
    assert plan_one(fleet(decided(), ledger=made, answers=answered(Choice.RETRAIN, NOW + 1))).action is Action.START


def test_an_answer_ends_the_pause_and_begins_its_own():
    failed = with_attempts(Outcome.FAILED, Outcome.FAILED, Outcome.FAILED)
    asked = fleet(decided(), ledger=failed, answers=answered(Choice.RETRAIN, NOW + 1.5 * HOUR))
    last = NOW + 2 * HOUR
    assert plan_one(asked, last + HOUR - 1).action is Action.WAIT
    assert plan_one(asked, last + HOUR).action is Action.START


def test_each_try_has_a_charge_of_its_own_and_the_same_one_until_it_is_charged():
    def charge(ledger: Ledger) -> Charge:
        found = plan_one(fleet(decided(), ledger=ledger), NOW + 99 * DAY).charge
        assert found is not None
        return found

    ids = [charge(with_attempts(*[Outcome.FAILED] * n)).id for n in range(3)]
    assert len(set(ids)) == 3
    assert ids[0] == charge(Ledger()).id


def test_the_estimate_is_the_larger_of_what_is_measured():
    def hours(choice: Choice, ledger: Ledger, **costs: float | None) -> float | None:
        return plan_one(fleet(decided(choice=choice, subject="new", **costs), ledger=ledger)).hours  # type: ignore[arg-type]

    retrained = charged("r", target="small")
    taken = Ledger().add(retrained, ended(retrained, 7.0, NOW))
    assert hours(Choice.RETRAIN, Ledger(), retrain=4.0) == 4.0
    assert hours(Choice.RETRAIN, taken, retrain=4.0) == 7.0
    assert hours(Choice.RETRAIN, taken, retrain=9.0) == 9.0
    assert hours(Choice.TUNE, taken, tune=2.0) == 2.0
    assert hours(Choice.TUNE, taken, tune=None, retrain=None) == 7.0
    assert hours(Choice.RETRAIN, Ledger(), tune=2.0, retrain=None) is None
    unknown = replace(fleet(decided(retrain=None)), budget=BudgetSpec(gpu_hours_per_week=9, unknown_gpu_hours=5.0))
    assert plan_one(unknown).hours == 5.0
