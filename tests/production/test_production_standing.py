"""What a server accepts now, beside the first hours of the same draft on it: by hours, by draft, never by another's counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from service_site import ServiceSite

from draftworks.config.observation import ObservationSpec, ObservedServerSpec
from draftworks.production.observer import Observation
from draftworks.production.readings import Reading
from draftworks.production.standing import (
    COLUMNS,
    GAP_S,
    assess_server,
    find_walk,
    format_row,
    list_notes,
    list_points,
    plot_series,
    to_json,
)
from draftworks.storage.artifacts import ArtifactStore

SERVER = ObservedServerSpec(name="front", url="https://a", kind="vllm", strategy="eagle3")
HOURS = ObservationSpec(baseline_hours=24, recent_hours=12)
HOUR = 3600.0


def make_readings(
    hours: int, accepted: float, draft: str = "a", start: float = 0.0, every: float = 1.0
) -> list[Reading]:
    """One process from its start, read every `every` hours: 100 passes an hour, with some noise that sums to nothing."""
    found, passes, taken = [], 0, 0
    for index in range(int(hours / every) + 1):
        counters = {"passes": passes, "accepted": taken, "proposed": passes * 5}
        found.append(Reading(start + index * every * HOUR, f"{draft} {start}", draft, True, "1", counters, None))
        passes += round(100 * every)
        taken += round(100 * every * accepted) + (1 if index % 2 else -1)
    return found


def assess(readings: list[Reading], hours: ObservationSpec = HOURS):
    return assess_server(Observation(SERVER, tuple(readings)), hours)


def test_a_draft_that_accepts_less_than_in_its_first_hours_shows_a_difference_with_its_interval():
    first = make_readings(24, 2.0)
    later = [
        Reading(r.time + 24 * HOUR, r.instance, r.draft, True, "1", {**{n: v + first[-1].counters[n] for n, v in r.counters.items()}}, None)
        for r in make_readings(30, 1.5)[1:]
    ]  # fmt: skip
    found = assess([*first, *later])
    assert found.baseline is not None
    assert found.now is not None
    assert found.baseline.value == pytest.approx(2.0, abs=0.02)
    assert found.now.value == pytest.approx(1.5, abs=0.02)
    assert found.now.seconds == 12 * HOUR
    assert found.difference is not None
    assert found.difference.interval is not None
    assert found.difference.interval.low < found.difference.value < found.difference.interval.high < -0.4


@pytest.mark.parametrize("hours", [1, 6, 11])
def test_soon_after_the_first_hours_none_of_them_is_among_those_of_now(hours: int):
    """Else a fall in service would be pulled to nothing as long as the last hours reach into the first ones."""
    first = make_readings(24, 2.0)
    shift, counted = 24 * HOUR, first[-1].counters
    later = [
        replace(each, time=each.time + shift, instance=first[0].instance, counters=add(each.counters, counted))
        for each in make_readings(hours, 1.0)[1:]
    ]
    found = assess([*first, *later])
    assert found.now is not None
    assert (found.now.seconds, found.now.passes) == (hours * HOUR, 100 * hours)
    assert found.difference is not None
    assert found.difference.value == pytest.approx(-1.0, abs=0.05)


def add(counters: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {name: value + others[name] for name, value in counters.items()}


def test_in_its_first_hours_a_draft_is_not_compared_with_itself():
    found = assess(make_readings(20, 2.0))
    assert (found.baseline, found.difference) == (None, None)
    assert found.now is not None
    assert "the first hours of this draft are not over" in " ".join(list_notes([found]))


def test_another_draft_begins_its_own_first_hours_and_the_former_ones_counts_are_not_its():
    found = assess([*make_readings(60, 2.0, "a"), *make_readings(3, 1.0, "b", start=61 * HOUR)])
    assert (found.draft, found.baseline, found.difference, found.restarts) == ("b", None, None, 1)
    assert found.now is not None
    assert (found.now.value, found.now.passes) == (pytest.approx(1.0, abs=0.02), 300)


def test_a_series_of_one_reading_a_day_has_first_hours_too():
    found = assess(make_readings(24 * 20, 2.0, every=24.5), ObservationSpec())
    assert found.baseline is not None
    assert found.baseline.windows == 1
    assert found.difference is not None
    assert found.difference.interval is None
    assert found.gaps > 0


def test_restarts_and_gaps_are_counted_and_told():
    readings = make_readings(5, 2.0)
    late = make_readings(5, 2.0, start=readings[-1].time + GAP_S + 1)
    found = assess([*readings, *late])
    assert (found.restarts, found.gaps) == (1, 1)
    assert "front: 1 restart, 1 gap of more than 2 h" in " ".join(list_notes([found]))


def test_a_server_that_was_never_read_or_once_has_no_figure_and_a_row():
    for readings in ([], make_readings(0, 2.0)):
        found = assess(readings)
        assert (found.now, found.baseline, found.difference, found.walk) == (None, None, None, None)
        row = dict(zip(COLUMNS, format_row(found), strict=True))
        assert (row["τ now"], row["read"] == "never") == ("", not readings)
        assert to_json(found)["now"] is None
        assert plot_series([found], "none") is None


def test_the_table_says_which_draft_is_only_assumed_and_that_there_is_no_interval():
    reading = Reading(0.0, None, "d1", False, "1", {}, 2.5)
    row = dict(zip(COLUMNS, format_row(assess([reading])), strict=True))
    assert row["draft"] == "d1 (in service; the server does not say)"
    assert row["τ now"] == "2.500 (gauge, no interval)"


@pytest.mark.usefixtures("pictures")
def test_a_plot_joins_windows_and_loses_no_count():
    found = assess(make_readings(50, 2.0))
    points = list_points(found, most=7)
    assert len(points) <= 7
    assert all(value == pytest.approx(2.0, abs=0.05) for value in points.values())
    assert plot_series([found], "small").startswith(b"\x89PNG")


def test_the_walk_is_that_of_the_draft_which_the_server_has(tmp_path):
    site = ServiceSite(tmp_path)
    first, second = site.publish("a", 1.0), site.publish("b", 2.0)
    artifacts = ArtifactStore(tmp_path / "var")
    for digest, value in ((first, 1.0), (second, 2.0)):
        walk = find_walk(artifacts, "small", "eagle3", digest)
        assert walk is not None
        assert (walk.rung, walk.value) == (3, value)
    for unknown in ("drafts/a", "not known", None):
        assert find_walk(artifacts, "small", "eagle3", unknown) is None
