"""The sensor of servers in production: off at first, a reading per tick, an asset event per hour, no run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from metrics_server import Pages, serve_pages, vllm_pages
from observed_site import ObservedSite

from draftworks.targets.registry import Registry
from resources.workspace import Workspace
from sensors.observation import make_observe_sensors


@pytest.fixture
def pages() -> Pages:
    return Pages(vllm_pages(5, 5))


@pytest.fixture
def site(tmp_path: Path, pages: Pages) -> Iterator[ObservedSite]:
    with serve_pages(pages) as url:
        yield ObservedSite.make(tmp_path, [{"name": "front", "url": url, "kind": "vllm", "timeout_s": 30.0}])


def tick(site: ObservedSite, cursor: str | None = None) -> dg.SensorResult:
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
    first = tick(site)
    [event] = first.asset_events
    assert (event.asset_key, event.partition) == (dg.AssetKey("eagle3_observed"), "small")
    second = tick(site, first.cursor)
    assert (list(second.asset_events), count_readings(site)) == ([], 2)
    state = json.loads(second.cursor or "")
    state["reported"] = {key: value - 3601 for key, value in state["reported"].items()}
    pages.pages = vllm_pages(9, 9)
    [event] = tick(site, json.dumps(state)).asset_events
    assert event.metadata["acceptance_length_front"].value == 2.0


def test_a_dead_server_and_a_broken_entry_stop_no_tick(site: ObservedSite, pages: Pages):
    (site.registry / "targets" / "broken.yaml").write_text("servers: [")
    pages.pages = {}
    found = tick(site)
    assert (list(found.asset_events), count_readings(site)) == ([], 0)
    pages.pages = vllm_pages(5, 5)
    assert len(tick(site, found.cursor).asset_events) == 1
