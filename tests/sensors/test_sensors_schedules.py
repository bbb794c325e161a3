"""Scheduled re-evaluation: one schedule per cadence, and each tick requests every target with a draft once."""

from __future__ import annotations

import datetime
import re
import zoneinfo
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.definitions.schedule_definition import ScheduleExecutionData
from dagster._core.scheduler.instigation import InstigatorStatus
from fleets import Fleet

from draftworks.targets.registry import Registry
from sensors.schedules import Cadence, is_switched_off, read_cadences
from spec_assets.code_location import build_definitions

NIGHTLY = {"cron": "0 3 * * *"}
THREE_O_CLOCK = datetime.datetime(2030, 5, 17, 3, tzinfo=datetime.UTC)


def list_evaluations(definitions: dg.Definitions) -> list[dg.ScheduleDefinition]:
    """Return the schedules but for the fleet's page, which every registry has."""
    return [one for one in definitions.get_repository_def().schedule_defs if one.job_name != "page"]


@pytest.fixture
def nightly(fleet: Fleet) -> Fleet:
    """`one` and `two`, with drafts, and `new` without: all to be evaluated every night."""
    for target in ("one", "two"):
        fleet.target_file(target).write_text(fleet.target_file(target).read_text() + f"evaluation: {NIGHTLY}\n")
    fleet.add("new", evaluation=NIGHTLY)
    return fleet


def only_schedule(fleet: Fleet) -> dg.ScheduleDefinition:
    (schedule,) = list_evaluations(build_definitions(fleet.registry))
    return schedule


def tick(
    fleet: Fleet, time: datetime.datetime = THREE_O_CLOCK, instance: dg.DagsterInstance | None = None
) -> ScheduleExecutionData:
    definitions = build_definitions(fleet.registry)
    (schedule,) = list_evaluations(definitions)
    return tick_of(schedule, fleet, time, instance)


def tick_of(
    schedule: dg.ScheduleDefinition,
    fleet: Fleet,
    time: datetime.datetime,
    instance: dg.DagsterInstance | None = None,
) -> ScheduleExecutionData:
    repository = build_definitions(fleet.registry).get_repository_def()
    with dg.build_schedule_context(
        instance=instance or dg.DagsterInstance.ephemeral(),
        repository_def=repository,
        scheduled_execution_time=time,
        resources={"workspace": fleet.workspace},
    ) as context:
        return schedule.evaluate_tick(context)


def keys(result: ScheduleExecutionData) -> list[str]:
    return [request.run_key for request in result.run_requests]


def test_targets_with_the_same_times_share_a_schedule(fleet):
    times = [NIGHTLY, {"cron": "0  3 * * *"}, {**NIGHTLY, "cron_timezone": "Europe/Berlin"}, {"cron": "0 4 * * mon"}]
    for number, evaluation in enumerate(times):
        fleet.add(f"t{number}", evaluation=evaluation)
    assert read_cadences(Registry(fleet.registry)) == {
        Cadence("0 3 * * *", "UTC"): ["t0", "t1"],
        Cadence("0 3 * * *", "Europe/Berlin"): ["t2"],
        Cadence("0 4 * * mon", "UTC"): ["t3"],
    }
    schedules = list_evaluations(build_definitions(fleet.registry))
    assert {(schedule.cron_schedule, schedule.execution_timezone, schedule.job_name) for schedule in schedules} == {
        ("0 3 * * *", "UTC", "evaluate"),
        ("0 3 * * *", "Europe/Berlin", "evaluate"),
        ("0 4 * * mon", "UTC", "evaluate"),
    }


def test_a_registry_without_times_has_no_schedule(fleet):
    assert list_evaluations(build_definitions(fleet.registry)) == []


def test_a_tick_asks_for_the_targets_that_have_drafts(nightly):
    assert [request.partition_key for request in tick(nightly).run_requests] == ["one", "two"]


def test_the_same_tick_again_has_the_same_run_keys_and_the_next_one_others(nightly):
    first, again = keys(tick(nightly)), keys(tick(nightly))
    following = keys(tick(nightly, THREE_O_CLOCK + datetime.timedelta(days=1)))
    assert first == again
    assert len({*first, *following}) == 4


def test_one_moment_has_one_run_key_in_every_time_zone(nightly):
    berlin = THREE_O_CLOCK.astimezone(datetime.timezone(datetime.timedelta(hours=2)))
    assert keys(tick(nightly)) == keys(tick(nightly, berlin))


def begin_run(instance: dg.DagsterInstance, job: str, target: str, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    run = dg.DagsterRun(job_name=job, status=status, tags={"dagster/partition": target})
    instance.add_run(run)
    return run


def test_a_target_that_a_run_is_at_work_on_is_left_to_it_and_the_run_is_named(nightly):
    with dg.instance_for_test() as instance:
        for job in ("evaluate", "train_eagle3", "prepare"):
            for status in (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED):
                run = begin_run(instance, job, "one", status)
                assert [request.partition_key for request in tick(nightly, instance=instance).run_requests] == ["two"]
                instance.delete_run(run.run_id)
        run = begin_run(instance, "evaluate", "one", dg.DagsterRunStatus.STARTING)
        begin_run(instance, "everything", "two", dg.DagsterRunStatus.STARTED)
        result = tick(nightly, instance=instance)
    assert not result.run_requests
    assert f"one: run {run.run_id[:8]} of evaluate is starting" in result.skip_message


def test_runs_that_have_ended_or_measure_nothing_hinder_no_tick(nightly):
    with dg.instance_for_test() as instance:
        begin_run(instance, "evaluate", "one", dg.DagsterRunStatus.SUCCESS)
        begin_run(instance, "evaluate", "one", dg.DagsterRunStatus.FAILURE)
        begin_run(instance, "resolve", "two", dg.DagsterRunStatus.STARTED)
        assert len(tick(nightly, instance=instance).run_requests) == 2


def test_a_tick_without_any_draft_says_so_for_each_target(tmp_path):
    fleet = Fleet(tmp_path)
    for target in ("one", "two"):
        fleet.add(target, evaluation=NIGHTLY)
    result = tick(fleet)
    assert not result.run_requests
    assert result.skip_message == "; ".join(
        f"{target}: none of its strategies has a draft yet: train one first" for target in ("one", "two")
    )


def test_an_entry_that_breaks_after_loading_is_left_out_of_the_tick(nightly):
    schedule = only_schedule(nightly)
    nightly.target_file("one").write_text("model: [")
    assert [request.partition_key for request in tick_of(schedule, nightly, THREE_O_CLOCK).run_requests] == ["two"]


def test_a_broken_entry_is_in_no_schedule_and_hides_no_other(nightly, caplog):
    nightly.target_file("one").write_text("model: [\nevaluation: {cron: 0 3 * * *}\n")
    assert read_cadences(Registry(nightly.registry)) == {Cadence("0 3 * * *", "UTC"): ["new", "two"]}
    assert "target one is in no schedule" in caplog.text
    assert "one.yaml: not valid YAML" in caplog.text


def test_a_schedule_keeps_its_name_when_targets_come_and_go(nightly):
    before = only_schedule(nightly).name
    nightly.add("another", evaluation=NIGHTLY)
    assert only_schedule(nightly).name == before


def test_a_schedule_is_named_after_its_times():
    assert Cadence("0 3 * * *", "UTC").schedule_name == "evaluate_0_3_any_any_any_UTC"
    often = Cadence("*/15 8-18 1,15 * mon", "America/Port-au-Prince")
    assert often.schedule_name == "evaluate_any_per_15_8_to_18_1_and_15_any_mon_America_Port_minus_au_minus_Prince"


def test_names_are_valid_and_no_two_cadences_share_one():
    every_minute = ",".join(map(str, range(60)))
    crons = ["0 3 * * *", "0-3 * * * *", "0,3 * * * *", "0/3 * * * *", "*/3 * * * *", f"{every_minute} * * * *"]
    zones = sorted(zoneinfo.available_timezones())
    names = [Cadence(cron, "UTC").schedule_name for cron in crons]
    names += [Cadence("1 2 3 4 5", zone).schedule_name for zone in zones]
    assert len(set(names)) == len(crons) + len(zones)
    assert all(re.fullmatch("[A-Za-z0-9_]{1,100}", name) for name in names)


def test_what_was_switched_off_under_a_former_name_stays_off_until_it_is_switched_on():
    cadence, states = Cadence("0 3 * * *", "UTC"), []
    instance = SimpleNamespace(all_instigator_state=lambda: states)

    def switch(name: str, status: InstigatorStatus) -> None:
        states.append(SimpleNamespace(instigator_name=name, status=status))

    assert not is_switched_off(instance, cadence)
    switch(cadence.former_name, InstigatorStatus.STOPPED)
    assert is_switched_off(instance, cadence)
    switch(cadence.schedule_name, InstigatorStatus.RUNNING)
    assert not is_switched_off(instance, cadence)
