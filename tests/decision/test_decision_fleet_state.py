"""The state of a fleet: entries are read where something is to be done, decisions compared with what is in service."""

from __future__ import annotations

from pathlib import Path

import pytest
from acting_fleet import ActingFleet
from decision_toys import NOW, charged

from draftworks.decision.budget import BudgetFile
from draftworks.decision.record import Choice


@pytest.fixture
def acting(tmp_path: Path) -> ActingFleet:
    acting = ActingFleet(tmp_path)
    acting.set_budget(10.0)
    acting.add("kept", Choice.KEEP)
    acting.add("wanted", settings={"traffic": 2.5})
    return acting


def test_settings_and_ranks_are_those_of_the_entry(acting: ActingFleet):
    path = acting.fleet.target_file("wanted")
    path.write_text(path.read_text() + "strategies: {eagle3: {training: {processes: 4}}}\nlauncher: {nodes: 2}\n")
    state = acting.reader.read({"wanted": "run 1 works"})
    target = state.targets["wanted"]
    assert (target.settings.traffic, target.settings.act, target.busy) == (2.5, "retrain", "run 1 works")
    assert target.ranks == {"eagle3": 8}
    assert state.budget is not None
    assert state.budget.gpu_hours_per_week == 10.0


def test_the_entry_of_a_draft_that_is_kept_is_not_read(acting: ActingFleet):
    acting.fleet.target_file("kept").write_text("model: [")
    state = acting.reader.read({})
    assert state.targets["kept"].problem is None
    assert state.targets.keys() == {"kept", "wanted"}


def test_decisions_of_targets_that_are_gone_are_left_out(acting: ActingFleet):
    acting.fleet.target_file("wanted").unlink()
    assert [each.target for each in acting.reader.read({}).decisions] == ["kept"]


def test_charges_can_be_left_out(acting: ActingFleet):
    BudgetFile(acting.var).charge([charged("a"), charged("b")], 10.0, NOW)
    assert acting.reader.read({}, without=["a"]).ledger.entries.keys() == {"b"}


def test_a_decision_is_compared_with_the_draft_in_service_and_the_newest_report(acting: ActingFleet):
    decisions = acting.reader.read({}).decisions
    assert acting.reader.find_outdated(decisions) == {}
    acting.serve("kept", "other")
    acting.fleet.publish_eval_data("wanted", "first")
    acting.fleet.publish_draft("wanted", "first")
    acting.fleet.publish_report("wanted")
    found = acting.reader.find_outdated(decisions)
    assert {key: each.blocks for key, each in found.items()} == {("kept", "eagle3"): True, ("wanted", "eagle3"): False}
    assert "newer report" in found["wanted", "eagle3"].reason


def test_a_damaged_record_of_the_service_blocks_that_target_alone(acting: ActingFleet):
    (acting.var / "in_service" / "wanted" / "eagle3" / "in_service.json").write_text("{")
    [((target, _), outdated)] = acting.reader.find_outdated(acting.reader.read({}).decisions).items()
    assert (target, outdated.blocks) == ("wanted", True)
    assert "in_service.json" in outdated.reason


def test_a_damaged_decision_is_told_and_the_others_go_on(acting: ActingFleet):
    (acting.var / "decisions" / "wanted" / "eagle3" / "decision.json").write_text("{")
    state = acting.reader.read({})
    assert [each.target for each in state.decisions] == ["kept"]
    [told] = state.damaged
    assert "it is decided again" in told


def test_a_decision_about_a_strategy_that_its_entry_does_not_use_is_outdated_if_it_calls_for_something(
    acting: ActingFleet,
):
    assert acting.reader.read({}).outdated == {}
    for target in ("kept", "wanted"):
        path = acting.fleet.target_file(target)
        path.write_text(path.read_text() + "strategies: {dflash: {}}\n")
    reason = "its entry does not use the strategy eagle3 any more"
    assert acting.reader.read({}).outdated == {("wanted", "eagle3"): reason}
