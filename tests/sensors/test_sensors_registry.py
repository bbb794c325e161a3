"""The registry sensor requests exactly the targets whose inputs changed, once each.
The sensor of servers in production: off at first, a reading per tick_observed, an asset event per hour, no run.
A charge is corrected to what its runs take: wall hours times ranks, whatever becomes of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from decision_toys import HOUR, NOW, charged
from metrics_server import Pages, serve_pages, vllm_pages
from observed_site import ObservedSite

from draftworks.decision.budget import Entry, Outcome
from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.acting import correct_by_runs
from sensors.observation import make_observe_sensors
from sensors.reevaluation import make_registry_sensor

TARGETS = ["one", "two"]


@pytest.fixture
def registry(tmp_path: Path, tiny_folder: Path) -> Path:
    root = tmp_path / "registry"
    for folder in ("targets", "datasets"):
        (root / folder).mkdir(parents=True)
    (root / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    (root / "chats.jsonl").write_text("{}\n")
    for name in ("one", "two"):
        (root / "targets" / f"{name}.yaml").write_text(f"model: {tiny_folder}\ndataset: chats\nmax_length: 64\n")
    return root


def tick(
    registry: Path, cursor: str | None = None, targets: Sequence[str] = TARGETS
) -> dg.SensorResult | dg.SkipReason:
    context = dg.build_sensor_context(cursor=cursor, resources={"workspace": Workspace(registry_root=str(registry))})
    return make_registry_sensor(targets)(context)


def requested(result: dg.SensorResult) -> list[str]:
    return [request.partition_key for request in result.run_requests]


def test_the_first_tick_asks_for_all_and_the_second_for_none(registry):
    first = tick(registry)
    assert requested(first) == ["one", "two"]
    assert isinstance(tick(registry, first.cursor), dg.SkipReason)


def test_a_changed_option_asks_for_its_own_target(registry):
    cursor = tick(registry).cursor
    path = registry / "targets" / "two.yaml"
    path.write_text(path.read_text().replace("64", "65"))
    assert requested(tick(registry, cursor)) == ["two"]


def test_changed_data_asks_for_all_that_use_it(registry):
    cursor = tick(registry).cursor
    (registry / "chats.jsonl").write_text("{}\n{}\n")
    assert requested(tick(registry, cursor)) == ["one", "two"]


def test_a_target_that_was_away_is_asked_for_only_if_it_changed_and_with_a_key_of_its_own(registry):
    def edit(target: str, old: str, new: str) -> None:
        path = registry / "targets" / f"{target}.yaml"
        path.write_text(path.read_text().replace(old, new))

    first = tick(registry)
    edit("two", "64", "65")
    moved = tick(registry, first.cursor)
    edit("one", "64", "66")
    away = tick(registry, moved.cursor, targets=["one"])
    assert requested(away) == ["one"]
    assert isinstance(tick(registry, away.cursor), dg.SkipReason)
    edit("two", "65", "64")
    back = tick(registry, away.cursor)
    assert requested(back) == ["two"]
    assert back.run_requests[0].run_key not in {request.run_key for request in first.run_requests}


def test_a_broken_entry_does_not_hide_the_others(registry):
    cursor = tick(registry).cursor
    (registry / "targets" / "one.yaml").write_text("model: [")
    path = registry / "targets" / "two.yaml"
    path.write_text(path.read_text().replace("64", "65"))
    result = tick(registry, cursor)
    assert requested(result) == ["two"]
    assert isinstance(tick(registry, result.cursor), dg.SkipReason)


def test_a_target_that_is_no_partition_yet_is_left_until_the_code_location_is_reloaded(registry):
    (registry / "targets" / "three.yaml").write_text((registry / "targets" / "two.yaml").read_text())
    assert requested(tick(registry)) == ["one", "two"]


def test_after_a_reset_of_the_cursor_the_same_inputs_are_asked_for_under_other_keys(registry):
    keys = [{request.run_key for request in tick(registry).run_requests} for _ in range(2)]
    assert not keys[0] & keys[1]
    assert [len(each) for each in keys] == [2, 2]


def test_run_keys_name_what_is_new(registry):
    first = tick(registry)
    path = registry / "targets" / "two.yaml"
    path.write_text(path.read_text().replace("64", "65"))
    second = tick(registry, first.cursor)
    path.write_text(path.read_text().replace("65", "64"))
    back = tick(registry, second.cursor)
    keys = {request.run_key for result in (first, second, back) for request in result.run_requests}
    assert len(keys) == 4


def test_it_is_off_by_default():
    assert make_registry_sensor(TARGETS).default_status is dg.DefaultSensorStatus.STOPPED


@pytest.fixture
def pages() -> Pages:
    return Pages(vllm_pages(5, 5))


@pytest.fixture
def site(tmp_path: Path, pages: Pages) -> Iterator[ObservedSite]:
    with serve_pages(pages) as url:
        yield ObservedSite.make(tmp_path, [{"name": "front", "url": url, "kind": "vllm", "timeout_s": 30.0}])


def tick_observed(site: ObservedSite, cursor: str | None = None) -> dg.SensorResult:
    [sensor] = make_observe_sensors(Registry(site.registry))
    assert sensor.default_status == dg.DefaultSensorStatus.STOPPED
    workspace = Workspace(registry_root=str(site.registry))
    found = sensor(dg.build_sensor_context(cursor=cursor, resources={"workspace": workspace}))
    assert isinstance(found, dg.SensorResult)
    assert not found.run_requests
    return found


def count_readings(site: ObservedSite) -> int:
    return len(site.open().recall()[0].readings)


def test_each_tick_reads_and_the_first_of_an_hour_records_an_event(site: ObservedSite, pages: Pages):
    first = tick_observed(site)
    [event] = first.asset_events
    assert (event.asset_key, event.partition) == (dg.AssetKey("eagle3_observed"), "small")
    second = tick_observed(site, first.cursor)
    assert (list(second.asset_events), count_readings(site)) == ([], 2)
    state = json.loads(second.cursor or "")
    state["reported"] = {key: value - 3601 for key, value in state["reported"].items()}
    pages.pages = vllm_pages(9, 9)
    [event] = tick_observed(site, json.dumps(state)).asset_events
    assert event.metadata["acceptance_length_front"].value == 2.0


def test_a_dead_server_and_a_broken_entry_stop_no_tick(site: ObservedSite, pages: Pages):
    (site.registry / "targets" / "broken.yaml").write_text("servers: [")
    pages.pages = {}
    found = tick_observed(site)
    assert (list(found.asset_events), count_readings(site)) == ([], 0)
    pages.pages = vllm_pages(5, 5)
    assert len(tick_observed(site, found.cursor).asset_events) == 1


def record_of(run: dg.DagsterRun, begun: float | None, ended: float | None) -> dg.RunRecord:
    moment = datetime.fromtimestamp(NOW, UTC)
    return dg.RunRecord(1, run, moment, moment, begun, ended)


@pytest.mark.parametrize(
    ("status", "begun", "now", "expected"),
    [
        (dg.DagsterRunStatus.SUCCESS, NOW, NOW + HOUR, (2.0, Outcome.SUCCEEDED)),
        (dg.DagsterRunStatus.FAILURE, NOW, NOW + 3 * HOUR, (6.0, Outcome.FAILED)),
        (dg.DagsterRunStatus.CANCELED, None, NOW + HOUR, (0.0, Outcome.FAILED)),
        (dg.DagsterRunStatus.STARTING, None, NOW + 9 * HOUR, (4.0, Outcome.OPEN)),
        (dg.DagsterRunStatus.STARTED, NOW, NOW + HOUR, (4.0, Outcome.OPEN)),
        (dg.DagsterRunStatus.STARTED, NOW, NOW + 5 * HOUR, (11.0, Outcome.OPEN)),
    ],
)
def test_a_run_takes_its_wall_hours_times_its_ranks(
    status: dg.DagsterRunStatus, begun: float | None, now: float, expected: tuple[float, Outcome]
):
    run = dg.DagsterRun(job_name="retrain_eagle3", status=status)
    charge = charged("a", 4.0, NOW)
    ended = now if run.is_finished else None
    [found] = correct_by_runs(Entry(charge, 4.0, NOW), [record_of(run, begun, ended)], now)
    assert (pytest.approx(found.hours), found.outcome) == expected
    known = dataclasses.replace(Entry(charge, found.hours, NOW, found.outcome), run=run.run_id)
    assert correct_by_runs(known, [record_of(run, begun, ended)], now) == []


def test_a_run_that_is_executed_again_counts_with_the_first():
    first = dg.DagsterRun(job_name="retrain_eagle3", status=dg.DagsterRunStatus.FAILURE)
    entry = Entry(charged("a", 4.0, NOW), 2.0, NOW + HOUR, Outcome.FAILED, first.run_id)
    records = [record_of(first, NOW, NOW + HOUR)]
    assert correct_by_runs(entry, records, NOW + 9 * HOUR) == []
    for status, ended, hours in [
        (dg.DagsterRunStatus.STARTED, None, 2.0 + 4.0),
        (dg.DagsterRunStatus.SUCCESS, NOW + 3 * HOUR, 2.0 + 2.0),
    ]:
        second = dg.DagsterRun(job_name="retrain_eagle3", status=status)
        both = [*records, record_of(second, NOW + 2 * HOUR, ended)]
        [found] = correct_by_runs(entry, both, NOW + 3 * HOUR)
        assert found.hours == pytest.approx(hours)
        assert found.run == second.run_id
