"""What decisions call for is started once, within the budget, charged before and corrected after; all else says why."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg
import pytest
import yaml
from acting_fleet import ActingFleet, start_run
from decision_toys import NOW
from kill_points import killed_before

from draftworks.decision.budget import BudgetFile, Correction, Entry, Outcome
from draftworks.decision.queue import Action, Step
from draftworks.decision.record import AnswerFile, Choice
from sensors.acting import CHARGE_TAG, Tick, explain_tick, group_reasons
from sensors.running_targets import SeriesCursor
from spec_assets.code_location import build_definitions


@pytest.fixture
def acting(tmp_path: Path) -> ActingFleet:
    acting = ActingFleet(tmp_path)
    acting.set_budget(10.0)
    acting.add("one", loss=0.2)
    acting.add("two", loss=0.3)
    return acting


def tick(acting: ActingFleet, instance: dg.DagsterInstance) -> tuple[dict[str, Step], list[dg.RunRequest]]:
    steps, requests = Tick(acting.reader, instance, time.time()).act()
    return {step.target: step for step in steps}, requests


def entries(acting: ActingFleet) -> dict[str, Entry]:
    return {entry.charge.target: entry for entry in BudgetFile(acting.var).read().entries.values()}


def test_what_is_called_for_is_charged_and_requested(acting: ActingFleet, instance: dg.DagsterInstance):
    steps, requests = tick(acting, instance)
    assert [request.partition_key for request in requests] == ["two", "one"]
    assert {request.job_name for request in requests} == {"retrain_eagle3"}
    for request in requests:
        entry = entries(acting)[str(request.partition_key)]
        assert entry.charge.id == request.run_key == request.tags[CHARGE_TAG]
        assert (entry.hours, entry.outcome) == (4.0, Outcome.OPEN)


def test_a_tune_starts_from_the_draft_in_service(acting: ActingFleet, instance: dg.DagsterInstance):
    acting.add("three", Choice.TUNE, act="tune")
    _, requests = tick(acting, instance)
    [request] = [each for each in requests if each.partition_key == "three"]
    assert request.job_name == "tune_eagle3"
    assert request.run_config["ops"]["eagle3_draft"]["config"] == {"start_from": "served"}
    job = build_definitions(acting.fleet.registry).get_repository_def().get_job("tune_eagle3")
    assert dg.validate_run_config(job, request.run_config)


def test_what_has_a_run_is_not_requested_again_and_its_end_corrects_the_ledger(
    acting: ActingFleet, instance: dg.DagsterInstance
):
    _, requests = tick(acting, instance)
    runs = {str(request.partition_key): start_run(instance, request) for request in requests}
    steps, again = tick(acting, instance)
    assert again == []
    assert all("busy" in step.reason for step in steps.values())
    assert entries(acting)["one"].run == runs["one"].run_id
    instance.report_run_failed(runs["one"])
    steps, again = tick(acting, instance)
    assert again == []
    assert entries(acting)["one"].outcome is Outcome.FAILED
    assert entries(acting)["one"].hours == 0.0  # it never began to work
    assert "failed 1 time in a row" in steps["one"].reason
    assert "busy" in steps["two"].reason


def test_a_charge_whose_tick_was_killed_is_requested_by_the_same_key(acting: ActingFleet, instance: dg.DagsterInstance):
    _, first = tick(acting, instance)
    _, second = tick(acting, instance)
    assert sorted(str(each.run_key) for each in first) == sorted(str(each.run_key) for each in second)
    assert len(entries(acting)) == 2


def test_a_charge_without_a_run_that_nothing_calls_for_any_more_is_withdrawn(
    acting: ActingFleet, instance: dg.DagsterInstance
):
    _, first = tick(acting, instance)
    AnswerFile(acting.var).hold("one", "me", "a test", NOW)
    steps, requests = tick(acting, instance)
    assert [request.partition_key for request in requests] == ["two"]
    assert (entries(acting)["one"].outcome, entries(acting)["one"].hours) == (Outcome.WITHDRAWN, 0.0)
    assert "on hold by me" in steps["one"].reason
    late = next(request for request in first if request.partition_key == "one")
    start_run(instance, late)  # the daemon had it after all
    tick(acting, instance)
    assert (entries(acting)["one"].outcome, entries(acting)["one"].hours) == (Outcome.OPEN, 4.0)


def test_a_run_whose_record_was_deleted_stays_charged(acting: ActingFleet, instance: dg.DagsterInstance):
    _, requests = tick(acting, instance)
    runs = [start_run(instance, request) for request in requests]
    tick(acting, instance)
    for run in runs:
        instance.delete_run(run.run_id)
    _, again = tick(acting, instance)
    assert again == []
    assert {(each.outcome, each.hours) for each in entries(acting).values()} == {(Outcome.FAILED, 4.0)}


def test_without_a_budget_or_with_a_small_one_nothing_exceeds_it(acting: ActingFleet, instance: dg.DagsterInstance):
    acting.set_budget(None)
    steps, requests = tick(acting, instance)
    assert requests == []
    assert all("no budget" in step.reason for step in steps.values())
    acting.set_budget(5.0)
    steps, requests = tick(acting, instance)
    assert [request.partition_key for request in requests] == ["two"]
    assert "1 of 5 are left" in steps["one"].reason


def test_a_decision_about_another_draft_or_other_weights_starts_nothing(
    acting: ActingFleet, instance: dg.DagsterInstance
):
    acting.serve("one", "other")
    (acting.fleet.model("two") / "model.safetensors").write_text("trained on")
    steps, requests = tick(acting, instance)
    assert requests == []
    assert "decided about draft served, in service is other" in steps["one"].reason
    assert "other weights" in steps["two"].reason


def test_it_is_decided_again_once_where_another_draft_is_in_service(acting: ActingFleet, instance: dg.DagsterInstance):
    acting.serve("one", "other")
    found = Tick(acting.reader, instance, time.time())
    [request] = found.request_decisions(SeriesCursor("", {}))
    assert (request.job_name, request.partition_key) == ("decide_eagle3", "one")
    assert found.request_decisions(SeriesCursor("", {"one:decide_eagle3": str(request.run_key)})) == []
    [reset] = found.request_decisions(SeriesCursor.read(None))
    assert reset.run_key != request.run_key


def test_a_target_with_a_run_is_left_alone(acting: ActingFleet, instance: dg.DagsterInstance):
    tags = {"dagster/partition": "one"}
    instance.add_run(dg.DagsterRun(job_name="everything", status=dg.DagsterRunStatus.STARTING, tags=tags))
    steps, requests = tick(acting, instance)
    assert [request.partition_key for request in requests] == ["two"]
    assert "busy: run" in steps["one"].reason


def test_an_entry_that_cannot_be_read_or_has_no_section_any_more_waits(
    acting: ActingFleet, instance: dg.DagsterInstance
):
    acting.fleet.target_file("one").write_text("model: [")
    acting.fleet.target_file("two").write_text("model: models/two\ndataset: none\n")
    steps, requests = tick(acting, instance)
    assert requests == []
    assert "one.yaml" in steps["one"].reason
    assert "no section decision" in steps["two"].reason


def test_a_tick_that_is_killed_anywhere_charges_nothing_twice(acting: ActingFleet, instance: dg.DagsterInstance):
    acting.set_budget(6.0)
    wanted, outcomes = {str(each.run_key) for each in tick(acting, instance)[1]}, set()
    for event in range(1000):
        BudgetFile(acting.var).path.unlink(missing_ok=True)
        killed = killed_before(event, lambda: Tick(acting.reader, instance, time.time()).act())
        outcomes.add(len(entries(acting)))
        if not killed or outcomes == {0, 1}:
            assert {str(each.run_key) for each in tick(acting, instance)[1]} == wanted
            assert len(entries(acting)) == 1
        if not killed:
            break
    assert outcomes == {0, 1}


def test_equal_reasons_are_one_line():
    steps = [Step(name, "eagle3", Action.WAIT, Choice.TUNE, "no budget") for name in ("a", "b")]
    steps.append(Step("c", "eagle3", Action.KEEP, Choice.KEEP, "the draft is kept"))
    assert group_reasons(steps)[0] == "wait: a eagle3, b eagle3: no budget"
    assert explain_tick(steps) == "wait: a eagle3, b eagle3: no budget; kept: 1 draft"


def evaluate(
    acting: ActingFleet,
    instance: dg.DagsterInstance,
    cursor: str | None = None,
    definitions: dg.Definitions | None = None,
):
    definitions = definitions or build_definitions(acting.fleet.registry)
    sensor = definitions.get_repository_def().get_sensor_def("decision_sensor")
    resources = {"workspace": acting.fleet.workspace}
    context = dg.build_sensor_context(instance=instance, cursor=cursor, definitions=definitions, resources=resources)
    return sensor, sensor.evaluate_tick(context)


def test_the_sensor_is_on_with_a_budget_and_requests_jobs_that_exist(acting: ActingFleet, instance: dg.DagsterInstance):
    acting.add("three", Choice.TUNE)
    acting.add("four", Choice.KEEP)
    acting.serve("four", "other")
    sensor, result = evaluate(acting, instance)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    assert {(each.job_name, each.partition_key) for each in result.run_requests} == {
        ("retrain_eagle3", "one"),
        ("retrain_eagle3", "two"),
        ("tune_eagle3", "three"),
        ("decide_eagle3", "four"),
    }
    BudgetFile(acting.var).correct(
        [Correction(i.charge.id, 1.0, NOW, Outcome.FAILED) for i in entries(acting).values()]
    )
    _, result = evaluate(acting, instance, result.cursor)
    assert result.run_requests == []
    assert "tried again after" in str(result.skip_message)


def test_a_damaged_ledger_starts_nothing_and_says_so(acting: ActingFleet, instance: dg.DagsterInstance):
    BudgetFile(acting.var).path.write_text("nonsense\n")
    _, result = evaluate(acting, instance)
    assert not result.run_requests
    assert "budget.jsonl, line 1" in str(result.skip_message)


def test_a_strategy_that_is_new_since_the_code_location_was_loaded_waits_for_a_reload_and_then_starts(
    acting: ActingFleet, instance: dg.DagsterInstance
):
    before = build_definitions(acting.fleet.registry)
    acting.add("three", strategy="dflash", loss=0.4)
    acting.add("four", Choice.KEEP, strategy="dflash")
    acting.serve("four", "other", "dflash")
    _, result = evaluate(acting, instance, definitions=before)
    assert {(each.job_name, each.partition_key) for each in result.run_requests} == {
        ("retrain_eagle3", "one"),
        ("retrain_eagle3", "two"),
    }
    assert set(entries(acting)) == {"one", "two"}
    steps, _ = Tick(acting.reader, instance, time.time(), ["eagle3"]).act()
    told = {step.target: step.reason for step in steps}
    assert told["three"] == "strategy dflash is new to this code location: reload it (in the UI under Deployment)"
    acting.set_budget(20.0)
    _, result = evaluate(acting, instance, result.cursor)
    found = {(each.job_name, each.partition_key) for each in result.run_requests}
    assert found >= {("retrain_dflash", "three"), ("decide_dflash", "four")}


def test_a_decision_about_a_strategy_that_its_entry_dropped_starts_nothing(
    acting: ActingFleet, instance: dg.DagsterInstance
):
    entry = yaml.safe_load(acting.fleet.target_file("one").read_text())
    acting.fleet.target_file("one").write_text(yaml.safe_dump({**entry, "strategies": {"dflash": {}}}))
    steps, requests = tick(acting, instance)
    assert [request.partition_key for request in requests] == ["two"]
    assert steps["one"].reason == "its entry does not use the strategy eagle3 any more"
    assert set(entries(acting)) == {"two"}
